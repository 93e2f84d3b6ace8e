//! `sandwire pool`: creates, lists, shows, changes and deletes pools.

mod create;
mod set;

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use sandwire_api::{
    client::Blocking,
    name::Name,
    pool::{AddressPlan, Pool},
    slot::SlotKind,
};
use serde_json::json;

use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    progress, render,
    verb::{policy::policy_rows, vsock::policy::rule_text},
};

/// What to do with pools.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Create a pool, from flags or from a file.
    Create(Box<create::Arguments>),
    /// List pools.
    List,
    /// Show a pool.
    Show {
        /// Name of the pool.
        name: Name,
    },
    /// Change a pool while it is used: size, policy, data path.
    Set(Box<set::Arguments>),
    /// Change how many slots are kept ready.
    Resize {
        /// Name of the pool.
        name: Name,
        /// Slots to keep ready, beside those that are leased.
        size: u32,
        /// Wait until that many are ready.
        #[arg(long)]
        wait: bool,
    },
    /// Delete a pool. Refused while it has leases.
    Delete(DeleteArguments),
}

/// Command line of `sandwire pool delete`.
#[derive(Debug, Args)]
pub(crate) struct DeleteArguments {
    /// Name of the pool.
    name: Name,
}

pub(crate) fn run(context: &Context, verb: Verb) -> Outcome {
    match verb {
        Verb::Create(arguments) => create::run(context, *arguments),
        Verb::List => {
            let pools = context.client().pools().map_err(cannot("list pools"))?;
            context.output.answer(&pools, |pools| pools_text(pools))
        }
        Verb::Show { name } => {
            let pool = context
                .client()
                .pool(&name)
                .map_err(cannot(format!("show pool {name}")))?;
            context.output.answer(&pool, pool_text)
        }
        Verb::Set(arguments) => set::run(context, *arguments),
        Verb::Resize { name, size, wait } => {
            let client = patient(context);
            let operation = format!("resize pool {name}");
            let mut pool = client
                .resize_pool(&name, size)
                .map_err(cannot(&operation))?;
            if wait {
                pool = wait_until_full(&client, pool)?;
            }
            context.output.answer(&pool, pool_text)
        }
        Verb::Delete(arguments) => delete(context, &arguments),
    }
}

/// Longer than the daemon waits for slots to be torn down, and for whoever changes a pool at the same time.
const PATIENCE: Duration = Duration::from_secs(300);

/// For what changes pools: the daemon does so for one after the other.
fn patient(context: &Context) -> Blocking {
    context.client().with_timeout(PATIENCE)
}

fn delete(context: &Context, arguments: &DeleteArguments) -> Outcome {
    let name = &arguments.name;
    let bar = indicatif::ProgressBar::new_spinner();
    bar.set_message(format!("deleting pool {name}"));
    bar.enable_steady_tick(Duration::from_millis(200));
    let deleted = patient(context).delete_pool(name);
    bar.finish_and_clear();
    deleted.map_err(cannot(format!("delete pool {name}")))?;
    context.output.answer(&json!({ "deleted": name }), |_| {
        format!("pool {name} deleted")
    })
}

/// How long a pool may fail to make progress before waiting for it ends.
const STALL_MAX: Duration = Duration::from_secs(10);

/// Waits until a pool has as many ready slots as it should.
fn wait_until_full(client: &Blocking, mut pool: Pool) -> Result<Pool, Failure> {
    let name = pool.spec.name.clone();
    let bar = progress::bar(pool.spec.size.into(), &format!("filling pool {name}"));
    let mut progressed_at = Instant::now();
    let mut ready_before = pool.slots.ready;
    while pool.slots.ready < pool.spec.size {
        bar.set_position(pool.slots.ready.into());
        std::thread::sleep(Duration::from_millis(50));
        pool = client
            .pool(&name)
            .map_err(cannot(format!("wait for pool {name}")))?;
        if pool.slots.ready > ready_before {
            progressed_at = Instant::now();
        }
        ready_before = pool.slots.ready;
        if progressed_at.elapsed() > STALL_MAX {
            bar.finish_and_clear();
            return Err(stalled(&pool));
        }
    }
    bar.finish_and_clear();
    Ok(pool)
}

fn stalled(pool: &Pool) -> Failure {
    let (name, ready, size) = (&pool.spec.name, pool.slots.ready, pool.spec.size);
    let cause = pool.last_error.clone().unwrap_or_else(|| {
        "it makes no progress; its slots may be in use by others: see 'sandwire pool show'"
            .to_owned()
    });
    Failure::failed(format!(
        "cannot fill pool {name}: {ready} of {size} slots are ready after {} s without progress: {cause}",
        STALL_MAX.as_secs()
    ))
}

fn pools_text(pools: &[Pool]) -> String {
    if pools.is_empty() {
        return "no pools\n".to_owned();
    }
    let headings = [
        "NAME",
        "SIZE",
        "READY",
        "BUILDING",
        "LEASED",
        "HELD",
        "RESTING",
        "ROOM",
        "ADDRESSES",
    ];
    let mut table = render::table(&headings);
    for pool in pools {
        let slots = &pool.slots;
        let numbers = [
            pool.spec.size,
            slots.ready,
            slots.building,
            slots.leased,
            slots.held,
            slots.tearing_down + slots.quarantined,
            pool.slots_max,
        ];
        let mut row = vec![pool.spec.name.to_string()];
        row.extend(numbers.iter().map(ToString::to_string));
        row.push(addresses_text(&pool.spec.addresses));
        table.add_row(row);
    }
    let mut text = render::table_text(&table);
    for pool in pools {
        if let Some(error) = &pool.last_error {
            text.push_str(&format!("pool {}: {error}\n", pool.spec.name));
        }
    }
    text
}

fn pool_text(pool: &Pool) -> String {
    let (spec, slots) = (&pool.spec, &pool.slots);
    let counts = format!(
        "{} ready of {}, {} building, {} leased, {} held by a VMM after release, {} being torn down, \
         {} resting; room for {}",
        slots.ready,
        spec.size,
        slots.building,
        slots.leased,
        slots.held,
        slots.tearing_down,
        slots.quarantined,
        pool.slots_max
    );
    let (kind, path) = (render::kind(spec.kind), render::data_path(spec.data_path));
    let mut rows = vec![
        ("pool", spec.name.to_string()),
        ("slots", counts),
        (
            "kind",
            format!(
                "{kind}, data path {path}, {}",
                render::count(spec.nics.into(), "interface")
            ),
        ),
    ];
    match spec.kind {
        // A container has the clone address itself, and of a TAP the MTU alone.
        SlotKind::Container => rows.extend(device_rows(pool)),
        SlotKind::Netns | SlotKind::Host => {
            rows.extend([("TAP", tap_text(pool)), ("guest", guest_text(pool))]);
        }
    }
    rows.push(("addresses", addresses_text(&spec.addresses)));
    rows.extend(policy_rows(&spec.policy));
    if !spec.device.is_child() {
        let most = spec.policy.connections_max;
        rows.push(("connections", format!("at most {most} per sandbox")));
    }
    let vsock_rules = spec.vsock.iter().flat_map(|policy| &policy.rules);
    rows.extend(vsock_rules.map(|rule| ("vsock", rule_text(rule))));
    rows.push(("quarantine", format!("{} s", spec.quarantine_seconds)));
    if let Some(error) = &pool.last_error {
        rows.push(("last error", error.clone()));
    }
    render::pairs(&rows)
}

fn device_rows(pool: &Pool) -> Vec<(&'static str, String)> {
    let (spec, mtu) = (&pool.spec, pool.spec.tap.mtu);
    let mut rows = vec![("device", format!("{}, MTU {mtu}", spec.device.name()))];
    if let Some(parent) = &spec.parent {
        let mut text = parent.interface.to_string();
        let subnets: Vec<String> = parent.subnets.iter().map(ToString::to_string).collect();
        let gateways: Vec<String> = parent.gateways.iter().map(ToString::to_string).collect();
        for (what, given) in [("subnet", subnets), ("gateway", gateways)] {
            // Else the parent's own, which may change.
            if !given.is_empty() {
                text.push_str(&format!(", {what} {}", given.join(" ")));
            }
        }
        rows.push(("parent", text));
    }
    rows
}

fn tap_text(pool: &Pool) -> String {
    let tap = &pool.spec.tap;
    let name = match pool.spec.kind {
        SlotKind::Host => "a name of its own each",
        SlotKind::Netns | SlotKind::Container => &tap.name,
    };
    let mut text = format!("{name}, MTU {}", tap.mtu);
    if let Some(uid) = tap.owner_uid {
        text.push_str(&format!(", uid {uid}"));
    }
    if let Some(gid) = tap.owner_gid {
        text.push_str(&format!(", gid {gid}"));
    }
    if tap.multi_queue {
        text.push_str(", multi-queue");
    }
    if !tap.vnet_header {
        text.push_str(", no virtio-net header");
    }
    text
}

fn guest_text(pool: &Pool) -> String {
    let guest = &pool.spec.guest;
    let mut text = format!("MAC {}", guest.mac);
    if let Some(ipv4) = guest.ipv4 {
        text.push_str(&format!(", {ipv4}"));
    }
    if let Some(ipv6) = guest.ipv6 {
        text.push_str(&format!(", {ipv6}"));
    }
    text
}

fn addresses_text(plan: &AddressPlan) -> String {
    let (scheme, ipv4, ipv6) = match plan {
        AddressPlan::Prefix { ipv4, ipv6 } => (None, *ipv4, *ipv6),
        AddressPlan::FirecrackerClones { ipv6 } => (Some("firecracker-clones"), None, *ipv6),
    };
    let parts = [
        scheme.map(str::to_owned),
        ipv4.map(|prefix| prefix.to_string()),
        ipv6.map(|prefix| prefix.to_string()),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use sandwire_api::pool::SlotCounts;

    use super::*;

    fn pool() -> Pool {
        let spec = serde_json::json!({
            "name": "web",
            "size": 16,
            "addresses": { "plan": "prefix", "ipv4": "10.64.0.0/16", "ipv6": "fd00:c10e::/64" },
            "policy": { "clone_to_clone": true, "host_services": ["tcp/53", "icmp"] },
        });
        Pool {
            spec: serde_json::from_value(spec).unwrap(),
            slots_max: 65_533,
            slots: SlotCounts {
                ready: 12,
                building: 4,
                leased: 3,
                ..SlotCounts::default()
            },
            last_error: Some("cannot create interface: no memory".to_owned()),
        }
    }

    #[test]
    fn a_pool_is_a_row_and_its_error_is_told() {
        let text = pools_text(&[pool()]);
        let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = [
            "web",
            "16",
            "12",
            "4",
            "3",
            "0",
            "0",
            "65533",
            "10.64.0.0/16",
            "fd00:c10e::/64",
        ];
        assert_eq!(cells, expected);
        assert!(text.contains("no memory"));
    }

    #[test]
    fn a_pool_shows_what_its_sandboxes_may_reach() {
        let text = pool_text(&pool());
        assert!(
            text.contains(
                "beyond the host with its address, clones of this pool, host tcp/53, host icmp"
            ),
            "{text}"
        );
    }

    #[test]
    fn a_pool_shows_what_its_kind_has() {
        let text = pool_text(&pool());
        assert!(text.contains("TAP:         vmtap0, MTU 1500"), "{text}");
        assert!(
            !text.contains("device:") && !text.contains("vsock:"),
            "{text}"
        );
        let mut host = pool();
        host.spec.kind = SlotKind::Host;
        let text = pool_text(&host);
        assert!(
            !text.contains("vmtap0") && text.contains("guest:"),
            "{text}"
        );

        let mut container = pool();
        let changed = serde_json::json!({
            "name": "web", "kind": "container", "device": "macvlan",
            "parent": { "interface": "eth1", "gateways": ["192.0.2.1"], "subnets": ["192.0.2.0/24"] },
            "addresses": { "plan": "prefix", "ipv4": "192.0.2.128/26" },
            "vsock": { "rules": [{ "port": "9000", "to": { "kind": "host" } }] },
        });
        container.spec = serde_json::from_value(changed).unwrap();
        let text = pool_text(&container);
        for line in [
            "device:     macvlan, MTU 1500",
            "parent:     eth1, subnet 192.0.2.0/24, gateway 192.0.2.1",
            "vsock:      port 9000 -> host",
        ] {
            assert!(text.contains(line), "{line} is missing in:\n{text}");
        }
        assert!(!text.contains("TAP") && !text.contains("guest"), "{text}");
    }

    #[test]
    fn a_pool_that_stalls_fails_with_the_daemons_reason() {
        let failure = stalled(&pool());
        assert_eq!(failure.exit_status, 2);
        assert!(failure.message.contains("12 of 16") && failure.message.contains("no memory"));
    }
}
