//! Results, in the version of the specification that was asked for, and what of them comes back as `prevResult`.

use std::path::PathBuf;

use ipnet::IpNet;
use sandwire_api::attach::{Attached, InterfaceName};
use serde_json::{Map, Value, json};

use crate::version::Version;

/// The result of an `ADD`: what the plugins before had, and what was attached now. A microVM on a TAP is told of as
/// `tc-redirect-tap` does: an interface of the TAP's name, whose sandbox is the container's id.
pub(crate) fn of_add(
    version: Version,
    container: &str,
    attached: &Attached,
    dns: Map<String, Value>,
    previous: Option<Map<String, Value>>,
) -> String {
    let mut result = previous.unwrap_or_default();
    result.insert("cniVersion".to_owned(), version.as_str().into());
    let interfaces = list_of(&mut result, "interfaces");
    if !attached.device.is_child() {
        interfaces.push(json!({ "name": attached.host_interface }));
    }
    let index = interfaces.len();
    interfaces.push(interface(version, attached));
    let mut with_addresses = vec![index];
    if let Some(tap) = &attached.tap {
        interfaces.push(json!({
            "name": tap.name,
            "mac": attached.gateway_mac,
            "sandbox": attached.netns,
        }));
        with_addresses.push(interfaces.len());
        interfaces.push(json!({ "name": tap.name, "mac": attached.mac, "sandbox": container }));
    }
    let of_each = with_addresses.into_iter().flat_map(|index| {
        let addresses = attached.addresses.iter();
        addresses.map(move |one| (index, one))
    });
    let addresses = of_each.map(|(index, one)| {
        let mut entry = json!({
            "interface": index,
            "address": one.address,
        });
        if let Some(gateway) = one.gateway {
            entry["gateway"] = gateway.to_string().into();
        }
        if version == Version::V0_4 {
            let family = if one.address.addr().is_ipv4() {
                "4"
            } else {
                "6"
            };
            entry["version"] = family.into();
        }
        entry
    });
    list_of(&mut result, "ips").extend(addresses);
    let routes = attached.routes.iter();
    list_of(&mut result, "routes")
        .extend(routes.map(|route| json!({ "dst": route.destination, "gw": route.gateway })));
    if !dns.is_empty() || !result.contains_key("dns") {
        result.insert("dns".to_owned(), Value::Object(dns));
    }
    format!("{:#}\n", Value::Object(result))
}

fn interface(version: Version, attached: &Attached) -> Value {
    let mut entry = json!({
        "name": attached.interface,
        "mac": attached.mac,
        "sandbox": attached.netns,
    });
    if version >= Version::V1_1 {
        entry["mtu"] = attached.mtu.into();
    }
    entry
}

/// A list of the result. Whatever else stands there is no list of ours to add to.
fn list_of<'a>(result: &'a mut Map<String, Value>, key: &str) -> &'a mut Vec<Value> {
    let value = result.entry(key).or_insert(Value::Null);
    if !value.is_array() {
        *value = Value::Array(Vec::new());
    }
    match value {
        Value::Array(list) => list,
        _ => unreachable!("it has just been made a list"),
    }
}

/// What a `prevResult` says of an interface in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recorded {
    /// File of the network namespace that it is in.
    pub(crate) sandbox: PathBuf,
    /// Its Ethernet address, as text.
    pub(crate) mac: Option<String>,
    /// Its MTU, which only newer versions have.
    pub(crate) mtu: Option<u64>,
    /// Its addresses.
    pub(crate) addresses: Vec<IpNet>,
    /// Destinations of all routes in the container.
    pub(crate) routes: Vec<IpNet>,
}

/// Finds an interface of a container in a `prevResult`.
pub(crate) fn recorded(result: &Map<String, Value>, name: &InterfaceName) -> Option<Recorded> {
    let interfaces = result.get("interfaces")?.as_array()?;
    let is_it = |entry: &Value| {
        let is_inside = entry["sandbox"]
            .as_str()
            .is_some_and(|path| !path.is_empty());
        is_inside && entry["name"] == name.as_str()
    };
    let index = interfaces.iter().position(is_it)?;
    let entries = |key: &str| {
        result
            .get(key)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
    };
    let prefix = |entry: &Value, key: &str| entry[key].as_str()?.parse().ok();
    let of_it = entries("ips").filter(|entry| entry["interface"].as_u64() == Some(index as u64));
    Some(Recorded {
        sandbox: interfaces[index]["sandbox"].as_str()?.into(),
        mac: interfaces[index]["mac"].as_str().map(str::to_owned),
        mtu: interfaces[index]["mtu"].as_u64(),
        addresses: of_it.filter_map(|entry| prefix(entry, "address")).collect(),
        routes: entries("routes")
            .filter_map(|entry| prefix(entry, "dst"))
            .collect(),
    })
}
