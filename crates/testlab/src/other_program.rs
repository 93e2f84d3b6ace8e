//! Somebody else's eBPF program on an interface of the product: counts packets and passes them on.
//!
//! Compiled by clang, loaded by a loader of its own, and attached where the test says. It goes with
//! its [`OtherProgram`].

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::Array,
    programs::{
        LinkOrder, SchedClassifier, TcAttachType, Xdp, XdpMode,
        tc::{NlOptions, TcAttachOptions, TcHandle},
    },
};

use crate::command;

/// Where such a program sits on an interface: on the way in, but for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// TCX, before all others that are there now.
    TcxFirst,
    /// TCX, after all others that are there now.
    TcxLast,
    /// A `cls_bpf` filter of this priority; low ones run first. The interface must have an `ingress` or
    /// `clsact` queueing discipline.
    Filter(u16),
    /// TCX on the way out, after all others that are there now.
    TcxEgress,
    /// XDP in the driver, before everything else.
    Xdp,
}

/// An attached program.
#[derive(Debug)]
pub struct OtherProgram {
    program: Ebpf,
}

impl OtherProgram {
    /// Compiles the program into `folder` and attaches it to an interface.
    ///
    /// # Errors
    /// If clang, the verifier or the hook refuses it.
    pub fn attach(folder: &Path, interface: &str, place: Place) -> Result<Self> {
        let object = compile(folder)?;
        let mut program =
            Ebpf::load_file(&object).with_context(|| format!("load {}", object.display()))?;
        let options = match place {
            Place::TcxFirst => Some(TcAttachOptions::TcxOrder(LinkOrder::first())),
            Place::TcxLast | Place::TcxEgress => Some(TcAttachOptions::TcxOrder(LinkOrder::last())),
            Place::Filter(priority) => Some(TcAttachOptions::Netlink(NlOptions {
                priority,
                handle: TcHandle::AUTO_ASSIGN,
                classid: None,
            })),
            Place::Xdp => None,
        };
        let way = match place {
            Place::TcxEgress => TcAttachType::Egress,
            _ => TcAttachType::Ingress,
        };
        let attached = match options {
            Some(options) => attach_to_tc(&mut program, interface, way, options),
            None => attach_to_driver(&mut program, interface),
        };
        attached
            .with_context(|| format!("attach the counting program to {interface}: {place:?}"))?;
        Ok(Self { program })
    }

    /// Packets that it has seen.
    ///
    /// # Errors
    /// If its map can't be read.
    pub fn packets(&self) -> Result<u64> {
        let seen: Array<_, u64> = self
            .program
            .map("seen")
            .context("the object has no map")?
            .try_into()?;
        Ok(seen.get(&0, 0)?)
    }
}

fn attach_to_tc(
    program: &mut Ebpf,
    interface: &str,
    way: TcAttachType,
    options: TcAttachOptions,
) -> Result<()> {
    let classifier: &mut SchedClassifier = program
        .program_mut("count")
        .context("the object has no program")?
        .try_into()?;
    classifier.load().context("load it")?;
    classifier.attach_with_options(interface, way, options)?;
    Ok(())
}

fn attach_to_driver(program: &mut Ebpf, interface: &str) -> Result<()> {
    let program: &mut Xdp = program
        .program_mut("count_frames")
        .context("the object has no XDP program")?
        .try_into()?;
    program.load().context("load it")?;
    program.attach(interface, XdpMode::Driver)?;
    Ok(())
}

fn compile(folder: &Path) -> Result<std::path::PathBuf> {
    let (source, object) = (folder.join("count.c"), folder.join("count.o"));
    fs::write(&source, SOURCE).with_context(|| format!("write {}", source.display()))?;
    let architecture = std::env::consts::ARCH;
    command::output_of(
        Command::new("clang")
            .args(["-target", "bpf", "-O2", "-g", "-c"])
            .arg(format!("-I/usr/include/{architecture}-linux-gnu"))
            .arg(&source)
            .arg("-o")
            .arg(&object),
    )?;
    Ok(object)
}

/// -1 is "go on" both for TCX (`TCX_NEXT`) and for filters (`TC_ACT_UNSPEC`).
const SOURCE: &str = "\
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} seen SEC(\".maps\");

static void see(void)
{
	__u32 zero = 0;
	__u64 *packets = bpf_map_lookup_elem(&seen, &zero);

	if (packets)
		__sync_fetch_and_add(packets, 1);
}

SEC(\"classifier\")
int count(struct __sk_buff *skb)
{
	see();
	return -1;
}

SEC(\"xdp\")
int count_frames(struct xdp_md *frame)
{
	see();
	return XDP_PASS;
}

char LICENSE[] SEC(\"license\") = \"Dual MIT/GPL\";
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{host::Beyond, lab};

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn packets_are_counted_at_each_place_and_go_on() {
        lab::run(|lab| {
            let _beyond = Beyond::attach().unwrap();
            lab.run("tc qdisc add dev up0 clsact");
            let places = [
                Place::TcxFirst,
                Place::TcxLast,
                Place::Filter(7),
                Place::TcxEgress,
                Place::Xdp,
            ];
            let programs: Vec<OtherProgram> = places
                .into_iter()
                .map(|place| OtherProgram::attach(lab.folder(), "up0", place).unwrap())
                .collect();
            lab.run("ping -n -c 3 -i 0.01 -W 5 203.0.113.2");
            for program in &programs {
                assert!(program.packets().unwrap() >= 3);
            }
            drop(programs);
            assert_eq!(lab.run("tc filter show dev up0 ingress").trim(), "");
            let link = lab.run("ip -d link show up0");
            assert!(!link.contains("xdp"), "{link}");
        });
    }
}
