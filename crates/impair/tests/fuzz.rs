//! The fuzz targets of `fuzz/`, for a short while and always with the same bytes: no nightly compiler needed.

#[path = "../../../fuzz/entries/impairment_text.rs"]
mod impairment_text;
#[path = "../../../fuzz/entries/scenario.rs"]
mod scenario;

use sandwire_impair::random::{Direction, Draw, Flow, Impairment, Stream};

fn below(draw: &mut Draw, most: usize) -> usize {
    usize::try_from(draw.below(most as u64)).expect("it is below a usize")
}

/// A seed whose words and lines are cut, doubled, swapped for those of others, and whose bytes are overwritten.
fn mutated(seeds: &[&str], draw: &mut Draw) -> Vec<u8> {
    let mut bytes = seeds[below(draw, seeds.len())].as_bytes().to_vec();
    for _ in 0..=below(draw, 5) {
        let (one, two) = (below(draw, bytes.len() + 1), below(draw, bytes.len() + 1));
        let from = one.min(two);
        let to = one.max(two).min(from + 40);
        let other = seeds[below(draw, seeds.len())].as_bytes();
        let start = below(draw, other.len());
        let part: Vec<u8> = other[start..]
            .iter()
            .copied()
            .take(below(draw, 30))
            .collect();
        match draw.below(5) {
            0 => {
                bytes.drain(from..to);
            }
            1 => bytes.extend_from_within(from..to),
            2 => {
                bytes.splice(from..to, part);
            }
            3 if !bytes.is_empty() => {
                let place = below(draw, bytes.len());
                bytes[place] = b"0123456789%-.;=\"\n{}[]x \xff"[below(draw, 24)];
            }
            _ => bytes.truncate(to),
        }
    }
    bytes
}

fn drive(entry: impl Fn(&[u8]), seeds: &[&str], cases: u64) {
    for seed in seeds {
        entry(seed.as_bytes());
    }
    let flow = Flow {
        seed: 1,
        link: 0,
        direction: Direction::Egress,
        rule: 0,
    };
    let stream = Stream::new(flow, Impairment::Loss);
    for case in 0..cases {
        entry(&mutated(seeds, &mut stream.draw(case)));
    }
}

#[test]
fn texts_of_impairments() {
    let seeds = [
        "seed 7; on-death open; budget 1ms; name dns egress match protocol=udp peer=10.0.0.0/8 peer_port=53 loss 1%",
        "delay 50ms 10ms normal correlation 25% order any limit 100 packets 64 kB rate 10mbit fq-codel flows 8 overhead -4 cells",
        "loss gilbert-elliott 1% 20% 100% 0%; match version=6 loss 4-state 1% 99% 0% 100% 0%; loss packets 3,17,20-29",
        "reorder 5% distance 3 within 10ms duplicate 1% corrupt 0.1% bits 3 repaired flap up 10s down 1s after 5s",
        "mtu 1400 silent no-fragments nat-rebind 30s after 1s addresses 192.0.2.1,::1; trace \"a b;c\" codel; partition blackhole",
        "preset wifi-bad loss 2%; match vlan=7 pass",
        r#"{"seed":7,"rule":[{"name":"a","delay":{"mean":"50ms","samples":["1ms"]},"loss":{"packets":[3,"5-9"]},"rate":"1mbit"}]}"#,
        r#"{"rule":[{"trace":{"file":"x","content":"1\n2\n"},"match":{"peer_port":53},"mtu":1400,"corrupt":{"share":"1%","bits":2}}]}"#,
    ];
    drive(impairment_text::run, &seeds, 10_000);
}

#[test]
fn files_of_scenarios() {
    let seeds = [
        "seed = 7\nduration = \"60s\"\nrepeat = 3\ngranularity = \"1s\"\n[[rule]]\nname = \"x\"\ndelay = \"50ms\"\nrate = \"10mbit\"\n",
        "[[rule]]\nname = \"x\"\nrate = \"9mbit\"\n[[step]]\nat = \"10s\"\nrule = \"x\"\nramp = { delay = \"200ms\", loss = \"5%\", rate = \"1mbit\" }\nover = \"10s\"\n",
        "[[step]]\nat = \"30s\"\ntarget = \"a\"\npartition = true\ndirection = \"egress\"\nfor = \"5s\"\n[[step]]\nat = \"32s\"\nheal = true\n",
        "repeat = \"forever\"\n[[step]]\nat = \"1s\"\nflap = \"up 2s down 1s\"\nfor = \"20s\"\n[[step]]\nat = \"9s\"\nset = \"loss 1%\"\n",
        "[[rule]]\nloss = \"1%\"\n[[step]]\nat = \"1s\"\nramp = { jitter = \"2ms\", corrupt = \"5%\" }\nover = \"3s\"\n[[step]]\nat = \"2s\"\nclear = true\n",
    ];
    drive(scenario::run, &seeds, 3_000);
}
