//! The texts of single impairments: what follows their words in a rule, or stands alone in a field.

use std::fmt;

use super::{COUNT, FromWords, InvalidText, Read, SHARE, TIME, Words, unknown_value};
use crate::impairment::{
    Checksum, Corrupt, Delay, Distribution, Flap, Loss, LossKind, LossTable, Mtu, NatRebind, Order,
    PacketRange, Percent, Queue, QueueKind, Rate, Reorder, TimeSpan, Trace, check::path_problem,
};

impl FromWords for Loss {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        if words.take("packets") {
            let packets: Vec<PacketRange> = words.list("numbers of packets, such as 3,17,20-29")?;
            return Ok(Self::Packets { packets });
        }
        let mut table = LossTable::default();
        if words.take("gilbert-elliott") {
            table.model = Some(LossKind::GilbertElliott);
            table.p = Some(words.value(SHARE)?);
            table.r = Some(words.value(SHARE)?);
            table.loss_bad = words.number()?;
            table.loss_good = words.number()?;
        } else if words.take("4-state") {
            table.model = Some(LossKind::FourState);
            table.p13 = Some(words.value(SHARE)?);
            table.p31 = words.number()?;
            table.p32 = words.number()?;
            table.p23 = words.number()?;
            table.p14 = words.number()?;
        } else {
            table.share =
                Some(words.value("a share such as 1%, or gilbert-elliott, 4-state or packets")?);
        }
        Ok(table.try_into()?)
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Independent { share } => write!(f, "{share}"),
            Self::GilbertElliott {
                p,
                r,
                loss_bad,
                loss_good,
            } => {
                write!(f, "gilbert-elliott {p} {r}")?;
                if (*loss_bad, *loss_good) != (Percent::all(), Percent::default()) {
                    write!(f, " {loss_bad} {loss_good}")?;
                }
                Ok(())
            }
            Self::FourState {
                p13,
                p31,
                p32,
                p23,
                p14,
            } => write!(f, "4-state {p13} {p31} {p32} {p23} {p14}"),
            Self::Packets { packets } => write!(f, "packets {}", Commas(packets)),
        }
    }
}

impl FromWords for Delay {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut delay = Self {
            mean: words.value(TIME)?,
            ..Self::default()
        };
        if let Some(jitter) = words.number()? {
            delay.jitter = jitter;
        }
        loop {
            match words.peek() {
                Some("uniform") => delay.distribution = Distribution::Uniform,
                Some("normal") => delay.distribution = Distribution::Normal,
                Some("pareto") => delay.distribution = Distribution::Pareto,
                Some("pareto-normal") => delay.distribution = Distribution::ParetoNormal,
                _ => break,
            }
            words.next();
        }
        loop {
            if words.take("correlation") {
                delay.correlation = words.value(SHARE)?;
            } else if words.take("samples") {
                delay.samples = words.list("times, such as 1ms,2ms,5ms")?;
            } else if words.take("limit") {
                delay.limit = Some(words.limit()?);
            } else if words.take("order") {
                delay.order = match words.value::<String>("keep or any")?.as_str() {
                    "keep" => Order::Keep,
                    "any" => Order::Any,
                    word => return Err(unknown_value("order", word, "keep or any")),
                };
            } else {
                return Ok(delay);
            }
        }
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = Self::default();
        write!(f, "{}", self.mean)?;
        if self.jitter != none.jitter || self.distribution != none.distribution {
            write!(f, " {}", self.jitter)?;
        }
        if self.distribution != none.distribution {
            write!(f, " {}", self.distribution)?;
        }
        if self.correlation != none.correlation {
            write!(f, " correlation {}", self.correlation)?;
        }
        if !self.samples.is_empty() {
            write!(f, " samples {}", Commas(&self.samples))?;
        }
        if self.order == Order::Any {
            write!(f, " order any")?;
        }
        self.limit
            .map_or(Ok(()), |limit| write!(f, " limit {limit}"))
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uniform => "uniform",
            Self::Normal => "normal",
            Self::Pareto => "pareto",
            Self::ParetoNormal => "pareto-normal",
        })
    }
}

impl Queue {
    /// Takes the next word if it says something about a queue.
    fn read_word(&mut self, words: &mut Words<'_>) -> Read<bool> {
        match words.peek() {
            Some("drop-tail") => self.kind = QueueKind::DropTail,
            Some("codel") => self.kind = QueueKind::Codel,
            Some("fq-codel") => self.kind = QueueKind::FqCodel,
            Some("limit" | "target" | "interval" | "flows" | "quantum") => {
                match words.next().unwrap_or_default() {
                    "limit" => self.limit = Some(words.limit()?),
                    "target" => self.target = Some(words.value(TIME)?),
                    "interval" => self.interval = Some(words.value(TIME)?),
                    "flows" => self.flows = Some(words.value(COUNT)?),
                    _ => self.quantum = Some(words.value(COUNT)?),
                }
                return Ok(true);
            }
            _ => return Ok(false),
        }
        words.next();
        Ok(true)
    }
}

impl fmt::Display for Queue {
    /// With a blank in front of each word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            QueueKind::DropTail => {}
            QueueKind::Codel => write!(f, " codel")?,
            QueueKind::FqCodel => write!(f, " fq-codel")?,
        }
        write_option(f, "limit", self.limit)?;
        write_option(f, "target", self.target)?;
        write_option(f, "interval", self.interval)?;
        write_option(f, "flows", self.flows)?;
        write_option(f, "quantum", self.quantum)
    }
}

impl FromWords for Rate {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut rate = Self {
            rate: words.value("a rate, such as 10mbit")?,
            ..Self::default()
        };
        let mut queue = Queue::default();
        loop {
            if words.take("overhead") {
                rate.overhead = words.value(COUNT)?;
            } else if words.take("cells") {
                rate.cells = true;
            } else if !queue.read_word(words)? {
                return Ok(rate.with_queue(queue));
            }
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.rate, self.queue())?;
        if self.overhead != 0 {
            write!(f, " overhead {}", self.overhead)?;
        }
        f.write_str(if self.cells { " cells" } else { "" })
    }
}

impl FromWords for Trace {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let before = words.so_far();
        let file: String = words.value("a file")?;
        if let Some(problem) = path_problem(&file) {
            let problem = problem.to_owned();
            return Err(InvalidText::Value { before, problem });
        }
        let mut queue = Queue::default();
        while queue.read_word(words)? {}
        let trace = Self {
            file,
            ..Self::default()
        };
        Ok(trace.with_queue(queue))
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends_a_word = |letter: char| letter.is_whitespace() || letter == ';';
        if self.file.is_empty() || self.file.contains(ends_a_word) {
            write!(f, "\"{}\"", self.file)?;
        } else {
            f.write_str(&self.file)?;
        }
        write!(f, "{}", self.queue())
    }
}

impl FromWords for Reorder {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut reorder = Self {
            share: words.value(SHARE)?,
            distance: 1,
            within: None,
        };
        loop {
            if words.take("distance") {
                reorder.distance = words.value(COUNT)?;
            } else if words.take("within") {
                reorder.within = Some(words.value(TIME)?);
            } else {
                return Ok(reorder);
            }
        }
    }
}

impl fmt::Display for Reorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} distance {}", self.share, self.distance)?;
        write_option(f, "within", self.within)
    }
}

impl FromWords for Corrupt {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut corrupt = Self {
            share: words.value(SHARE)?,
            bits: 1,
            checksum: Checksum::Broken,
        };
        loop {
            if words.take("bits") {
                corrupt.bits = words.value(COUNT)?;
            } else if words.take("repaired") {
                corrupt.checksum = Checksum::Repaired;
            } else if words.take("broken") {
                corrupt.checksum = Checksum::Broken;
            } else {
                return Ok(corrupt);
            }
        }
    }
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.share)?;
        if self.bits != 1 {
            write!(f, " bits {}", self.bits)?;
        }
        f.write_str(match self.checksum {
            Checksum::Broken => "",
            Checksum::Repaired => " repaired",
        })
    }
}

impl FromWords for Flap {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let (mut up, mut down, mut after) = (None, None, None);
        loop {
            if words.take("up") {
                up = Some(words.value(TIME)?);
            } else if words.take("down") {
                down = Some(words.value(TIME)?);
            } else if words.take("after") {
                after = Some(words.value(TIME)?);
            } else {
                break;
            }
        }
        let missing = |needed| InvalidText::Missing {
            before: words.so_far(),
            needed,
        };
        Ok(Self {
            up: up.ok_or_else(|| missing("up and a time, such as up 10s"))?,
            down: down.ok_or_else(|| missing("down and a time, such as down 1s"))?,
            after: after.unwrap_or_default(),
        })
    }
}

impl fmt::Display for Flap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up {} down {}", self.up, self.down)?;
        let after = (self.after != TimeSpan::default()).then_some(self.after);
        write_option(f, "after", after)
    }
}

impl FromWords for Mtu {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut mtu = Self {
            bytes: words.value("a number of bytes, such as 1400")?,
            icmp: true,
            fragment: true,
        };
        loop {
            if words.take("silent") {
                mtu.icmp = false;
            } else if words.take("no-fragments") {
                mtu.fragment = false;
            } else {
                return Ok(mtu);
            }
        }
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let silent = if self.icmp { "" } else { " silent" };
        let fragments = if self.fragment { "" } else { " no-fragments" };
        write!(f, "{}{silent}{fragments}", self.bytes)
    }
}

impl FromWords for NatRebind {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut rebind = Self {
            every: words.number()?,
            ..Self::default()
        };
        loop {
            if words.take("every") {
                rebind.every = Some(words.value(TIME)?);
            } else if words.take("after") {
                rebind.after = Some(words.value(TIME)?);
            } else if words.take("addresses") {
                rebind.addresses = words.list("addresses, such as 192.0.2.1,192.0.2.2")?;
            } else {
                return Ok(rebind);
            }
        }
    }
}

impl fmt::Display for NatRebind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        words.extend(self.every.map(|every| every.to_string()));
        words.extend(self.after.map(|after| format!("after {after}")));
        if !self.addresses.is_empty() {
            words.push(format!("addresses {}", Commas(&self.addresses)));
        }
        f.write_str(&words.join(" "))
    }
}

fn write_option<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    word: &str,
    value: Option<T>,
) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, " {word} {value}"))
}

/// Values with commas between them.
struct Commas<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for Commas<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, value) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{value}")?;
        }
        Ok(())
    }
}
