//! Interfaces that eBPF slots' packets may leave by without the host's own stack.

use std::collections::BTreeSet;

use sandwire_datapath::Uplink;
use sandwire_kernel_net::{interface, route, xdp};

use super::Worker;
use crate::{error::NetworkError, plan::names};

/// The uplinks as they are now: the interfaces of these names; without names, those that a default
/// route leads out by. One that isn't there is left out until it is. `xdp`: XDP is wanted on them, and
/// takes the reasons of those that can't.
pub(super) fn find(
    worker: &mut Worker,
    instance: &str,
    wanted: Option<&[String]>,
    xdp: Option<&mut Vec<String>>,
) -> Result<Vec<Uplink>, NetworkError> {
    let defaults: BTreeSet<_> = match wanted {
        Some(_) => BTreeSet::new(),
        None => route::list(&mut worker.route)?
            .into_iter()
            .filter(|route| route.destination.prefix_len() == 0)
            .filter_map(|route| route.interface)
            .collect(),
    };
    let shared = names::shared_interface(instance);
    let mut uplinks = Vec::new();
    match wanted {
        Some(wanted) => {
            for name in wanted {
                uplinks.extend(interface::find(&mut worker.route, name)?);
            }
        }
        None => {
            for index in defaults {
                uplinks.extend(interface::find_by_index(&mut worker.route, index)?);
            }
        }
    }
    let ours = |name: &str| name == shared || names::parse_host_interface(name).is_some();
    uplinks.retain(|uplink| !ours(&uplink.name) && uplink.kind.as_deref() != Some("loopback"));
    let mut uplinks: Vec<Uplink> = uplinks
        .into_iter()
        .map(|uplink| Uplink {
            index: uplink.index,
            fq: uplink.queue.as_deref() == Some("fq"),
            name: uplink.name,
            xdp: false,
        })
        .collect();
    if let Some(refusals) = xdp {
        for uplink in &mut uplinks {
            match why_without_xdp(uplink)? {
                None => uplink.xdp = true,
                Some(reason) => refusals.push(reason),
            }
        }
    }
    Ok(uplinks)
}

fn why_without_xdp(uplink: &Uplink) -> Result<Option<String>, NetworkError> {
    let name = &uplink.name;
    let reason = match xdp::features(uplink.index)? {
        None => "the kernel can't tell what its driver can do (that takes Linux 6.3)",
        Some(features) if !features.runs_programs => "its driver has no XDP",
        Some(features) if !features.redirects => "its driver's XDP can't send frames elsewhere",
        Some(features) if !features.takes_frames => "its driver takes no frames from XDP",
        Some(_) => return Ok(None),
    };
    Ok(Some(format!("uplink {name}: {reason}")))
}
