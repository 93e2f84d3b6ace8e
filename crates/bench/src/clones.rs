//! The suite `clones`: seed 000's evaluation. Many slots, many guests, some of them active: how long
//! a ping takes, and how fast a client per guest can send, from the host and from beyond its uplink.
//!
//! Ways stand side by side, each in a played host of its own. Up to a hundred active guests are real
//! kernels; beyond that, and once more for all, they are fake ones. What a slot adds to a round trip is
//! measured apart, by probes that take turns between the ways and guests that never sleep.

mod ping;
mod probe;
mod real;
mod throughput;

use std::{collections::BTreeMap, thread, time::Duration};

use anyhow::{Context, Result, bail};

use crate::{
    guest::receiver::{Receivers, Waiting},
    host::HostFacts,
    progress::Step,
    record::Record,
    statistics, tcp,
    way::{Limit, Place, Plan, Sandbox, Switches, Way, policy},
};

pub(crate) use ping::Pinger;

/// Sizes of the suite.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Slots that there are.
    pub(crate) slots: u32,
    /// Guests that run.
    pub(crate) endpoints: u32,
    /// Guests that have traffic, in turn.
    pub(crate) active: Vec<u32>,
    /// Largest number of active guests that are real ones; zero for none.
    pub(crate) linux_max: u32,
    /// Seconds of pings; zero for none.
    pub(crate) ping_seconds: u32,
    /// Seconds of sending.
    pub(crate) throughput_seconds: u32,
    /// Times that the two ways of the promises take turns.
    pub(crate) rounds: u32,
    /// Probes for each way.
    pub(crate) probes: u32,
    /// Run only these ways; all if empty.
    pub(crate) only: Vec<Way>,
    /// Where clients are.
    pub(crate) clients: Vec<Client>,
    /// How the clients' TCP controls congestion.
    pub(crate) congestion: String,
}

impl Sizes {
    /// The seed's own parameters.
    pub(crate) fn full() -> Self {
        Self {
            slots: 3000,
            endpoints: 1000,
            active: vec![FEW, 1000],
            linux_max: 100,
            ping_seconds: 30,
            throughput_seconds: 40,
            rounds: 5,
            probes: 10_000,
            only: Vec::new(),
            clients: Client::ALL.to_vec(),
            congestion: tcp::CUBIC.to_owned(),
        }
    }

    /// Sizes for a first impression within two minutes.
    pub(crate) fn quick() -> Self {
        Self {
            slots: 30,
            endpoints: 20,
            active: vec![2, 20],
            linux_max: 2,
            ping_seconds: 2,
            throughput_seconds: 2,
            rounds: 1,
            probes: 1000,
            only: Vec::new(),
            clients: Client::ALL.to_vec(),
            congestion: tcp::CUBIC.to_owned(),
        }
    }

    /// The smallest and the largest number of active guests.
    fn few_and_many(&self) -> (u32, u32) {
        let few = self.active.iter().min().copied().unwrap_or(0);
        let many = self.active.iter().max().copied().unwrap_or(0);
        (few, many)
    }
}

const WAYS: [Way; 5] = [
    Way::Kernel,
    Way::Recipe,
    Way::Nft,
    Way::EbpfNetns,
    Way::EbpfHost,
];
/// The ways that take turns more than once.
const COMPARED: [Way; 2] = [Way::Kernel, Way::EbpfHost];
/// Every guest is pinged so often.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// Active guests whose ratio has no number in its name: the promise's.
const FEW: u32 = 100;
const REACH_PATIENCE: Duration = Duration::from_secs(30);

/// Where a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Client {
    /// On the host.
    Host,
    /// Beyond its uplink.
    Beyond,
}

impl Client {
    const ALL: [Self; 2] = [Self::Host, Self::Beyond];

    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Beyond => "beyond",
        }
    }

    /// The namespace that it is in.
    fn namespace(self, place: &Place) -> &str {
        match self {
            Self::Host => place.world.name(),
            Self::Beyond => place.world.beyond(),
        }
    }
}

/// The name of a way's rows in this suite; the seed calls the kernel's own forwarding basic.
fn case(way: Way) -> &'static str {
    match way {
        Way::Kernel => "basic",
        other => other.name(),
    }
}

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(sizes: &Sizes) -> Result<Record> {
    let mut record = Record::new("clones", HostFacts::read()?, settings(sizes));
    let mut places = Vec::new();
    for way in WAYS {
        if !sizes.only.is_empty() && !sizes.only.contains(&way) {
            continue;
        }
        match place(way, sizes) {
            Ok(place) => places.push((way, place)),
            Err(error) => record.not_run(case(way), &format!("{error:#}")),
        }
    }
    for client in sizes.clients.iter().copied() {
        probe::run(&places, client, sizes.probes, &mut record)?;
    }
    for active in &sizes.active {
        fake_guests(sizes, *active, &places, &mut record)?;
        if *active <= sizes.linux_max {
            real::run(sizes, *active, &places, &mut record)?;
        }
    }
    for (_, place) in places {
        place.end()?;
    }
    add_ratios(sizes, &mut record);
    Ok(record)
}

fn settings(sizes: &Sizes) -> BTreeMap<String, u64> {
    let (few, many) = sizes.few_and_many();
    [
        ("slots", sizes.slots),
        ("endpoints", sizes.endpoints),
        ("active_few", few),
        ("active_many", many),
        ("linux_guests_max", sizes.linux_max),
        ("ping_seconds", sizes.ping_seconds),
        ("throughput_seconds", sizes.throughput_seconds),
        ("rounds", sizes.rounds),
        ("probes", sizes.probes),
    ]
    .map(|(name, value)| (name.to_owned(), u64::from(value)))
    .into()
}

fn place(way: Way, sizes: &Sizes) -> Result<Place> {
    let step = Step::begin(
        &format!("{} slots by {}", sizes.slots, case(way)),
        sizes.slots,
    );
    let full = Switches {
        deny_list: true,
        limit: Limit::Wide,
    };
    let plan = Plan {
        slots: sizes.slots,
        leases: sizes.endpoints,
        policies: vec![policy(full)?],
    };
    Place::build(way, &plan, |built| step.at(built))
}

/// All endpoints are fake guests; the first `active` of them have traffic.
fn fake_guests(
    sizes: &Sizes,
    active: u32,
    places: &[(Way, Place)],
    record: &mut Record,
) -> Result<()> {
    for round in 0..sizes.rounds {
        // Who goes first changes, so that what drifts falls on both.
        let mut order: Vec<_> = places.iter().collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for (way, place) in order {
            if round > 0 && !COMPARED.contains(way) {
                continue;
            }
            let endpoints = &place.sandboxes[..sizes.endpoints as usize];
            let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
            let guests = Receivers::start(endpoints, threads, Waiting::Asleep)?;
            let targets = &endpoints[..active as usize];
            for client in sizes.clients.iter().copied() {
                let label = format!("{}_{active}", client.name());
                let subject = Subject {
                    way: *way,
                    place,
                    client,
                    targets,
                };
                subject.measure(sizes, &label, round == 0, record)?;
            }
            guests.end()?;
        }
    }
    Ok(())
}

/// Who sends to whom.
struct Subject<'a> {
    way: Way,
    place: &'a Place,
    client: Client,
    targets: &'a [Sandbox],
}

impl Subject<'_> {
    /// Pings in the first round, and throughput in every one.
    fn measure(
        &self,
        sizes: &Sizes,
        label: &str,
        with_ping: bool,
        record: &mut Record,
    ) -> Result<()> {
        let what = format!("{label} by {}", case(self.way));
        let _step = Step::begin(&what, 1);
        let namespace = self.client.namespace(self.place);
        let addresses: Vec<_> = self.targets.iter().map(|target| target.clone).collect();
        let doing = || format!("cannot measure {what}");
        ping::reach_all(namespace, &addresses, REACH_PATIENCE).with_context(doing)?;
        let case = case(self.way);
        if with_ping && sizes.ping_seconds > 0 {
            let duration = Duration::from_secs(sizes.ping_seconds.into());
            let pings =
                ping::run(namespace, &addresses, PING_INTERVAL, duration).with_context(doing)?;
            pings.add(record, case, label);
        }
        let duration = Duration::from_secs(sizes.throughput_seconds.into());
        let rates = throughput::run(namespace, &addresses, &sizes.congestion, duration)
            .with_context(doing)?;
        add_rates(record, case, label, &rates)
    }
}

fn add_rates(
    record: &mut Record,
    case: &str,
    label: &str,
    rates: &throughput::Rates,
) -> Result<()> {
    let repeated = format!("{label}_throughput_repeated");
    record.add(case, &repeated, "segments", &[f64::from(rates.repeated)]);
    let rates = &rates.megabits;
    let sum: f64 = rates.iter().sum();
    let Some(p5) = statistics::percentile(rates, 5) else {
        bail!("no client has sent anything");
    };
    let figures = [
        ("mean", sum / f64::from(u32::try_from(rates.len())?)),
        ("p5", p5),
        ("min", rates.iter().copied().fold(f64::INFINITY, f64::min)),
        ("max", rates.iter().copied().fold(0.0, f64::max)),
    ];
    for (kind, value) in figures {
        let metric = format!("{label}_throughput_{kind}");
        record.add(case, &metric, "Mbit/s", &[value]);
    }
    Ok(())
}

fn add_ratios(sizes: &Sizes, record: &mut Record) {
    let congestion = &sizes.congestion;
    let (few, many) = sizes.few_and_many();
    for client in ["host", "beyond"] {
        let name = if few == FEW {
            format!("throughput_ebpf_host_vs_basic_{client}")
        } else {
            format!("throughput_{few}_ebpf_host_vs_basic_{client}")
        };
        let fake = format!("{client}_{few}_throughput_mean");
        let real = format!("{client}_{few}_linux_throughput_mean");
        let metric = if record.row("ebpf_host", &real).is_some() {
            compare(record, &format!("{name}_fake_guests"), &fake, congestion);
            real
        } else {
            fake
        };
        compare(record, &name, &metric, congestion);
    }
    for kind in ["mean", "p5"] {
        // The seed's clients are on the host.
        let name = format!("throughput_{many}_{kind}_vs_basic");
        let metric = format!("host_{many}_throughput_{kind}");
        compare(record, &name, &metric, congestion);
        let metric = format!("beyond_{many}_throughput_{kind}");
        compare(record, &format!("{name}_beyond"), &metric, congestion);
    }
    for case in ["basic", "ebpf_host"] {
        let name = format!("throughput_{many}_p5_vs_mean_{case}");
        let metric = |kind| format!("host_{many}_throughput_{kind}");
        let (p5, mean) = (metric("p5"), metric("mean"));
        record.add_ratio(&name, (case, &p5), (case, &mean));
    }
    probe::add_ratios(record);
}

/// Ours over basic, with what the single rounds say: short ones differ by more than the two ways do.
fn compare(record: &mut Record, name: &str, metric: &str, congestion: &str) {
    let (ours, basic) = (("ebpf_host", metric), ("basic", metric));
    record.add_ratio(name, ours, basic);
    let samples = |(case, metric)| record.row(case, metric).map(|row| row.samples.as_slice());
    let Some((ours, basic)) = samples(ours).zip(samples(basic)) else {
        return;
    };
    let rounds: Vec<f64> = ours.iter().zip(basic).map(|(a, b)| a / b).collect();
    let low = rounds.iter().copied().fold(f64::INFINITY, f64::min);
    let high = rounds.iter().copied().fold(0.0, f64::max);
    let count = rounds.len();
    let note =
        format!("{low:.2} to {high:.2} in {count} rounds; the clients' TCP has {congestion}");
    record.note(name, &note);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_named_by_how_many_clients_there_were() {
        let of = |active: &[u32]| {
            let sizes = Sizes {
                active: active.to_vec(),
                ..Sizes::full()
            };
            let mut record = Record::new("clones", HostFacts::default(), settings(&sizes));
            for number in active {
                for kind in ["mean", "p5"] {
                    let metric = format!("host_{number}_throughput_{kind}");
                    for case in ["basic", "ebpf_host"] {
                        record.add(case, &metric, "Mbit/s", &[1.0]);
                    }
                }
            }
            add_ratios(&sizes, &mut record);
            record
        };
        let names = |active: &[u32]| of(active).ratios.into_keys().collect::<Vec<_>>();
        let many = |number: u32| {
            [
                "mean_vs_basic",
                "p5_vs_basic",
                "p5_vs_mean_basic",
                "p5_vs_mean_ebpf_host",
            ]
            .map(|rest| format!("throughput_{number}_{rest}"))
        };
        let with = |number: u32, few: &str| {
            let mut names = many(number).to_vec();
            names.push(few.to_owned());
            names.sort();
            names
        };
        let promised = "throughput_ebpf_host_vs_basic_host";
        assert_eq!(names(&[100, 1000]), with(1000, promised));
        assert_eq!(names(&[100]), with(100, promised));
        assert_eq!(
            names(&[1000]),
            with(1000, "throughput_1000_ebpf_host_vs_basic_host")
        );
        assert_eq!(
            names(&[2, 20]),
            with(20, "throughput_2_ebpf_host_vs_basic_host")
        );
        let settings = of(&[20, 2]).settings;
        assert_eq!((settings["active_few"], settings["active_many"]), (2, 20));
    }

    #[test]
    fn a_ratio_tells_what_its_rounds_say() {
        let mut record = Record::new("clones", HostFacts::default(), BTreeMap::new());
        record.add("basic", "host_1_throughput_mean", "Mbit/s", &[100.0, 200.0]);
        record.add(
            "ebpf_host",
            "host_1_throughput_mean",
            "Mbit/s",
            &[90.0, 220.0],
        );
        compare(&mut record, "ratio", "host_1_throughput_mean", "reno");
        let note = "0.90 to 1.10 in 2 rounds; the clients' TCP has reno";
        assert_eq!(record.notes["ratio"], note);
        compare(&mut record, "none", "of_nobody", "reno");
        assert!(!record.notes.contains_key("none"));
    }
}
