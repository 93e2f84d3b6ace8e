//! Any bytes are read as a capture, in bounded memory, and what was read is read again from a file of ours.

use sandwire_engine::io::pcap::{Format, Reader, Writer};

/// One case.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(mut reader) = Reader::new(bytes) else {
        return;
    };
    let mut writer =
        Writer::new(Vec::new(), Format::Pcapng, &["fuzz"]).expect("memory takes everything");
    let mut frames = Vec::new();
    while let Ok(Some(captured)) = reader.read() {
        assert!(captured.frame.len() <= bytes.len());
        assert!(captured.frame.len() as u64 <= u64::from(captured.length));
        let time = captured.time.unwrap_or_default();
        writer
            .write(0, time, captured.frame, Some("again"))
            .expect("memory takes everything");
        frames.push((time, captured.frame.to_vec()));
    }
    let file = writer.into_inner();
    let mut reader = Reader::new(&file[..]).expect("we can read what we write");
    for (time, frame) in frames {
        let again = reader.read().expect("we can read what we write");
        let again = again.expect("as many frames");
        assert_eq!((again.time, again.frame), (Some(time), &frame[..]));
    }
    assert_eq!(reader.read().expect("we can read what we write"), None);
}
