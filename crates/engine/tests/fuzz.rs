//! The fuzz targets of `fuzz/`, for a short while and always with the same bytes: no fuzzer needed.

#[path = "../../../fuzz/entries/classifier.rs"]
mod classifier;
#[path = "../../../fuzz/drive.rs"]
mod drive;
#[path = "../../../fuzz/entries/pcap_reader.rs"]
mod pcap_reader;

use drive::drive;

const CASES: u64 = 20_000;

#[test]
fn the_classifier() {
    drive("classifier", classifier::run, &[], CASES);
}

#[test]
fn the_reader_of_captures() {
    drive("pcap_reader", pcap_reader::run, &[], CASES);
}
