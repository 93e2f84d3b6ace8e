//! Any file is a trace or refused; packets that go by one leave in order, none before it came.

use sandwire_impair::trace::{Trace, TraceLine};

/// One case: sizes and distances of packets from the first bytes, then a file.
pub(crate) fn run(bytes: &[u8]) {
    let Some((packets, file)) = bytes.split_at_checked(16) else {
        return;
    };
    let Ok(text) = std::str::from_utf8(file) else {
        return;
    };
    let Ok(trace) = Trace::parse(text) else {
        return;
    };
    for number in 0..40 {
        assert!(trace.opportunity(number) <= trace.opportunity(number + 1));
    }
    let start = 5_000_000;
    let mut line = TraceLine::new(trace, start);
    let (mut now, mut before) = (start, start);
    for pair in packets.chunks_exact(2) {
        let starts = line.starts_at(now);
        let sent = line.send(now, u32::from(pair[0]) * 16);
        assert!(starts >= now && sent >= starts && sent >= before);
        assert_eq!(line.busy_until(), sent);
        before = sent;
        now += u64::from(pair[1]) * 1_000_000;
    }
}
