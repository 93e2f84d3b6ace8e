//! `sandwire show`: a lease with what the kernel says of it now.

use clap::Args;
use sandwire_api::{
    attach::Attached,
    lease::{Lease, LeaseDetail, TapStatus},
    name::Name,
    published_port::PublishedPort,
    slot::{Nic, TapUse},
    traffic::Traffic,
    vsock::{VsockChannel, VsockTraffic},
};

use crate::{
    Context,
    connection::cannot,
    failure::Outcome,
    render,
    verb::{list::state_text, policy::policy_rows, publish, vsock::kind_text},
};

/// Command line of `sandwire show`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Name of the lease.
    name: Name,

    /// Numeric user that holds it, if not you; for root.
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let name = &arguments.name;
    let detail = context
        .client()
        .lease(name, arguments.owner_uid)
        .map_err(cannot(format!("show lease {name}")))?;
    context.output.answer(&detail, detail_text)
}

/// A lease: what to plug the sandbox into, and by which addresses it is known.
pub(crate) fn lease_text(lease: &Lease) -> String {
    let now = render::now();
    let age = render::span(now.saturating_sub(lease.acquired_at));
    let ends = lease
        .expires_at
        .map_or("when it is released".to_owned(), |end| {
            format!("in {}", render::span(end.saturating_sub(now)))
        });
    let mut text = render::pairs(&[
        ("lease", lease.name.to_string()),
        ("pool", format!("{}, slot {}", lease.pool, lease.slot)),
        (
            "state",
            format!("{} for {age}, ends {ends}", state_text(lease.state)),
        ),
        ("owner", format!("uid {}", lease.owner_uid)),
        (
            "namespace",
            lease.netns.clone().unwrap_or_else(|| "-".to_owned()),
        ),
    ]);
    match &lease.attached {
        Some(attached) => {
            text.push_str("\ninterface\n");
            text.push_str(&attached_text(attached));
        }
        None => {
            for (index, nic) in lease.nics.iter().enumerate() {
                text.push_str(&format!("\ninterface {index}\n"));
                text.push_str(&nic_text(nic));
            }
        }
    }
    if let Some(channel) = &lease.vsock {
        text.push_str("\nvsock\n");
        text.push_str(&channel_text(channel));
    }
    text
}

fn channel_text(channel: &VsockChannel) -> String {
    let cid = match channel.virtual_cid {
        Some(virtual_cid) => format!("{}, for siblings {virtual_cid}", channel.cid),
        None => channel.cid.to_string(),
    };
    let mut rows = vec![
        ("  kind", kind_text(channel.kind).to_owned()),
        ("  CID", cid),
        ("  socket", channel.socket.clone()),
    ];
    rows.extend(
        channel
            .vhost_user_socket
            .clone()
            .map(|socket| ("  vhost-user socket", socket)),
    );
    for (key, arguments) in [
        ("  QEMU", &channel.qemu_arguments),
        ("  Cloud Hypervisor", &channel.cloud_hypervisor_arguments),
    ] {
        if !arguments.is_empty() {
            rows.push((key, arguments.join(" ")));
        }
    }
    rows.extend(
        channel
            .firecracker_vsock
            .clone()
            .map(|body| ("  Firecracker", format!("PUT /vsock {body}"))),
    );
    render::pairs(&rows)
}

fn attached_text(attached: &Attached) -> String {
    let device = attached.device.name();
    let leads_to_it = match attached.device.is_child() {
        true => "  parent",
        false => "  host end",
    };
    let mut rows = vec![
        (
            "  name",
            format!("{} in {}", attached.interface, attached.netns.display()),
        ),
        (
            "  device",
            format!("{device}, MTU {}, MAC {}", attached.mtu, attached.mac),
        ),
        (leads_to_it, attached.host_interface.clone()),
    ];
    if let Some(reason) = &attached.device_reason {
        rows.insert(2, ("  because", reason.clone()));
    }
    if let Some(tap) = &attached.tap {
        let who = [("user", tap.owner_uid), ("group", tap.owner_gid)];
        let who = who.map(|(kind, id)| id.map_or(String::new(), |id| format!(", of {kind} {id}")));
        rows.push(("  TAP", format!("{}{}", tap.name, who.concat())));
    }
    for own in &attached.addresses {
        let key = if own.address.addr().is_ipv4() {
            "  IPv4"
        } else {
            "  IPv6"
        };
        let gateway = own.gateway.map(|gateway| gateway.to_string());
        let gateway = gateway.unwrap_or_else(|| "none".to_owned());
        rows.push((key, format!("{}, gateway {gateway}", own.address)));
    }
    let routes: Vec<String> = attached
        .routes
        .iter()
        .map(|route| route.destination.to_string())
        .collect();
    if !routes.is_empty() {
        rows.push(("  routes", routes.join(" ")));
    }
    render::pairs(&rows)
}

fn nic_text(nic: &Nic) -> String {
    let mut rows = vec![
        ("  TAP", format!("{}, MTU {}", nic.tap, nic.mtu)),
        ("  guest MAC", nic.guest_mac.to_string()),
        ("  gateway MAC", nic.gateway_mac.to_string()),
    ];
    if let Some(ipv4) = &nic.ipv4 {
        rows.push((
            "  guest IPv4",
            format!("{}, gateway {}", ipv4.guest, ipv4.gateway),
        ));
        rows.push(("  clone IPv4", ipv4.clone_address.to_string()));
    }
    if let Some(ipv6) = &nic.ipv6 {
        rows.push((
            "  guest IPv6",
            format!("{}, gateway {}", ipv6.guest, ipv6.gateway),
        ));
        rows.push(("  clone IPv6", ipv6.clone_address.to_string()));
    }
    render::pairs(&rows)
}

/// A lease with TAP use, traffic, policy, ports and defects.
fn detail_text(detail: &LeaseDetail) -> String {
    let mut text = lease_text(&detail.lease);
    text.push('\n');
    if let Some(impairment) = &detail.lease.impairment {
        text.push_str(&format!("impaired: {impairment}\n"));
    }
    for tap in &detail.taps {
        text.push_str(&tap_text(tap));
    }
    if let Some(connections) = detail.connections {
        text.push_str(&format!("connections tracked: {connections}\n"));
    }
    text.push_str(&format!(
        "data path: {}\n",
        render::data_path(detail.data_path)
    ));
    if let Some(note) = &detail.data_path_note {
        text.push_str(&format!("  {note}\n"));
    }
    if let Some(traffic) = &detail.traffic {
        text.push_str(&traffic_text(traffic));
    }
    if let Some(traffic) = &detail.vsock_traffic {
        text.push_str(&vsock_traffic_text(traffic));
    }
    let whose = if detail.has_own_policy {
        "its own"
    } else {
        "its pool's"
    };
    text.push_str(&format!("policy: {whose}\n"));
    let rows = policy_rows(&detail.policy);
    for row in render::pairs(&rows).lines() {
        text.push_str(&format!("  {row}\n"));
    }
    text.push_str(&ports_text(&detail.published_ports));
    if detail.defects.is_empty() {
        text.push_str("defects: none\n");
    }
    for defect in &detail.defects {
        text.push_str(&format!(
            "defect: {}: {} ({})\n",
            defect.object, defect.problem, defect.action
        ));
    }
    text
}

fn vsock_traffic_text(traffic: &VsockTraffic) -> String {
    let vmm = match traffic.attached {
        true => "a VMM is attached",
        false => "no VMM is attached",
    };
    let mut text = format!(
        "vsock: {vmm}, {}\n  egress: {}\n  ingress: {}\n",
        render::count(
            usize::try_from(traffic.connections).unwrap_or(usize::MAX),
            "connection"
        ),
        render::bytes(traffic.egress_bytes),
        render::bytes(traffic.ingress_bytes),
    );
    let refused: u64 = traffic.refusals.values().sum();
    if refused > 0 {
        text.push_str(&format!("  refused: {refused}\n"));
    }
    text
}

fn tap_text(status: &TapStatus) -> String {
    let mut text = format!("TAP {}: {}\n", status.tap, tap_use_text(status.used));
    for (direction, count) in [("egress", status.egress), ("ingress", status.ingress)] {
        text.push_str(&format!(
            "  {direction}: {} packets, {}, {} dropped\n",
            count.packets,
            render::bytes(count.bytes),
            count.dropped
        ));
    }
    text
}

/// What a TAP's use means, and what to do where it is wrong.
pub(crate) fn tap_use_text(used: TapUse) -> &'static str {
    match used {
        TapUse::Unused => "unused: nobody has it open",
        TapUse::Attached => "attached: a VMM has it open",
        TapUse::Missing => {
            "MISSING: the TAP is gone, the sandbox has no network; release the lease and acquire another"
        }
        TapUse::Foreign => {
            "FOREIGN: an interface of that name is there, but not the one made for this slot. A VMM that \
             found none may have made it; it has no network. Stop the VMM, release the lease and acquire another"
        }
    }
}

/// What the data path let through, and what it dropped and why.
fn traffic_text(traffic: &Traffic) -> String {
    let mut text = String::new();
    for (direction, total) in [("egress", &traffic.egress), ("ingress", &traffic.ingress)] {
        text.push_str(&format!(
            "let through, {direction}: {} packets ({} on the wire), {}\n",
            total.packets,
            total.segments,
            render::bytes(total.bytes)
        ));
    }
    for (reason, count) in traffic.drops.iter().filter(|(_, count)| **count > 0) {
        text.push_str(&format!(
            "dropped, {}: {count}. {}\n",
            reason.name(),
            reason.text()
        ));
    }
    text
}

fn ports_text(ports: &[PublishedPort]) -> String {
    if ports.is_empty() {
        return "published ports: none\n".to_owned();
    }
    let line =
        |port: &PublishedPort| format!("published port: {}\n", publish::port_text(&port.port));
    ports.iter().map(line).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use sandwire_api::{
        drop_reason::DropReason,
        impairment::ImpairmentSummary,
        lease::{LeaseState, TrafficCount},
        pool::PolicySpec,
        published_port::{Protocol, PublishPort},
        slot::{DataPath, Defect, NicIpv4, NicIpv6},
        traffic::TrafficTotal,
    };

    use super::*;

    /// A lease as the daemon would answer it.
    pub(crate) fn lease() -> Lease {
        Lease {
            name: "a7".parse().unwrap(),
            pool: "web".parse().unwrap(),
            slot: 17,
            owner_uid: 1000,
            state: LeaseState::Active,
            acquired_at: 1_000_000,
            expires_at: None,
            netns: Some("/run/netns/sandwire.default.web.17".to_owned()),
            netns_name: Some("sandwire.default.web.17".to_owned()),
            nics: vec![Nic {
                tap: "vmtap0".to_owned(),
                mtu: 1500,
                guest_mac: "06:00:c0:a8:f1:02".parse().unwrap(),
                gateway_mac: "02:73:77:00:00:01".parse().unwrap(),
                ipv4: Some(NicIpv4 {
                    guest: "192.168.241.2/29".parse().unwrap(),
                    gateway: "192.168.241.1".parse().unwrap(),
                    clone_address: "10.64.0.19".parse().unwrap(),
                }),
                ipv6: Some(NicIpv6 {
                    guest: "fd00:5eed::2/64".parse().unwrap(),
                    gateway: "fd00:5eed::1".parse().unwrap(),
                    clone_address: "fd00:c10e::13".parse().unwrap(),
                }),
            }],
            vsock: None,
            impairment: None,
            attached: None,
        }
    }

    fn detail(used: TapUse) -> LeaseDetail {
        LeaseDetail {
            lease: lease(),
            published_ports: vec![PublishedPort {
                lease: "a7".parse().unwrap(),
                owner_uid: 1000,
                port: PublishPort {
                    protocol: Protocol::Tcp,
                    host_address: None,
                    host_port: 8080,
                    clone_port: 80,
                    nic: 0,
                },
            }],
            taps: vec![TapStatus {
                tap: "vmtap0".to_owned(),
                used,
                egress: TrafficCount {
                    packets: 3,
                    bytes: 2048,
                    dropped: 1,
                },
                ingress: TrafficCount::default(),
            }],
            defects: vec![Defect {
                object: "nft table sandwire".to_owned(),
                problem: "was gone".to_owned(),
                action: "repaired".to_owned(),
            }],
            connections: Some(5),
            data_path: DataPath::Ebpf,
            data_path_note: Some("xdp is not used: the TAP has offloads".to_owned()),
            policy: PolicySpec::default(),
            has_own_policy: false,
            vsock_traffic: None,
            traffic: Some(Traffic {
                egress: TrafficTotal {
                    packets: 3,
                    bytes: 2048,
                    segments: 44,
                },
                drops: [(DropReason::Metadata, 7)].into(),
                ..Traffic::default()
            }),
        }
    }

    #[test]
    fn a_lease_shows_all_that_a_vmm_needs() {
        let text = lease_text(&lease());
        for needed in [
            "/run/netns/sandwire.default.web.17",
            "vmtap0",
            "06:00:c0:a8:f1:02",
            "192.168.241.2/29, gateway 192.168.241.1",
            "fd00:5eed::2/64, gateway fd00:5eed::1",
            "10.64.0.19",
            "fd00:c10e::13",
        ] {
            assert!(text.contains(needed), "{needed} is missing in:\n{text}");
        }
    }

    #[test]
    fn a_detail_shows_traffic_ports_and_defects() {
        let text = detail_text(&detail(TapUse::Attached));
        for needed in [
            "TAP vmtap0: attached",
            "egress: 3 packets, 2.0 KiB, 1 dropped",
            "connections tracked: 5",
            "data path: ebpf",
            "the TAP has offloads",
            "let through, egress: 3 packets (44 on the wire), 2.0 KiB",
            "dropped, metadata: 7. Cloud metadata",
            "policy: its pool's\n  may reach: beyond the host",
            "published port: tcp *:8080 -> port 80",
            "defect: nft table sandwire: was gone (repaired)",
        ] {
            assert!(text.contains(needed), "{needed} is missing in:\n{text}");
        }
    }

    #[test]
    fn an_impaired_lease_says_so_and_whether_that_is_carried_out() {
        let mut detail = detail(TapUse::Attached);
        assert!(!detail_text(&detail).contains("impair"));
        let impairment = "preset lte loss 2%".parse().unwrap();
        detail.lease.impairment = Some(ImpairmentSummary::new(&impairment, false));
        let text = detail_text(&detail);
        let line = text.lines().find(|line| line.starts_with("impaired: "));
        let line = line.unwrap();
        assert!(
            line.contains("preset lte") && line.contains("dead"),
            "{line}"
        );
    }

    #[test]
    fn a_tap_that_a_vmm_made_itself_is_told_apart() {
        assert!(detail_text(&detail(TapUse::Foreign)).contains("FOREIGN"));
        assert!(detail_text(&detail(TapUse::Missing)).contains("MISSING"));
    }
}
