//! XDP on the TAP of a host slot, in the driver or in generic mode.
//!
//! In the driver it is what a pool of the data path `xdp` has. Generic mode is what seed 004's authors
//! used and what we don't offer: the same program and the same maps, attached another way.

use anyhow::{Context, Result, ensure};
use sandwire_datapath::{Datapath, Settings, Uplink, abi::NicFlag, folder_for};
use sandwire_kernel_net::{interface, netlink::Socket, xdp};

use super::{Place, Way};
use crate::world;

/// Puts the program where the way wants it. Returns whether the pool had none: then it is the
/// benchmark that has attached it.
pub(super) fn attach(way: Way, instance: &str, place: &Place) -> Result<bool> {
    place.world.take_xdp()?;
    let host = place.world.name();
    let mut socket = world::netlink_of(host)?;
    let mut is_ours = false;
    for sandbox in &place.sandboxes {
        let tap = interface::find(&mut socket, &sandbox.tap)?;
        let index = tap.context("a lease's TAP is gone")?.index;
        let is_attached = xdp::find(&mut socket, index)?.is_some();
        let name = &sandbox.tap;
        if !is_attached {
            is_ours = true;
            enable(instance, index.0, &mut socket)?;
        }
        let pin = folder_for(instance).join("v1/programs/from_guest_xdp");
        ensure!(pin.exists(), "there is no program at {}", pin.display());
        match way {
            Way::XdpGeneric => {
                if is_attached {
                    world::ip_in(host, &format!("link set dev {name} xdpdrv off"))?;
                }
                let words = format!("link set dev {name} xdpgeneric pinned {}", pin.display());
                world::ip_in(host, &words)?;
            }
            _ if is_attached => {}
            _ => {
                let words = format!("link set dev {name} xdpdrv pinned {}", pin.display());
                world::ip_in(host, &words)?;
            }
        }
    }
    Ok(is_ours)
}

/// Tells the data path that a TAP's frames have complete checksums, and that uplinks take XDP.
fn enable(instance: &str, tap: u32, socket: &mut Socket) -> Result<()> {
    let opened = Datapath::open(&Settings::new(folder_for(instance)))?;
    ensure!(
        opened.migrated_from.is_none(),
        "the daemon's maps are of other sizes than the benchmark's"
    );
    let datapath = opened.datapath;
    let used = datapath.used().into_iter();
    let found = used.into_iter().find(|(_, nic)| nic.ifindex == tap);
    let (nic, _) = found.context("the data path doesn't know the TAP")?;
    datapath.set_flag(nic, NicFlag::Xdp, true);
    datapath.set_xdp_nic(tap, Some(nic))?;
    let mut uplinks = Vec::new();
    for name in [world::VETH, world::TAP] {
        let uplink = interface::find(socket, name)?.context("an uplink is gone")?;
        uplinks.push(Uplink {
            index: uplink.index,
            name: uplink.name,
            fq: false,
            xdp: true,
        });
    }
    let refusals = datapath.set_uplinks(&uplinks)?;
    refusals
        .into_iter()
        .next()
        .map_or(Ok(()), |refusal| Err(refusal.into()))
}
