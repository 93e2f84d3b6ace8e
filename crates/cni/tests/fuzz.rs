//! The entry point of the fuzz target over its seeds, and over bytes made of them.

#[path = "../../../fuzz/entries/cni_config.rs"]
mod cni_config;
#[path = "../../../fuzz/drive.rs"]
mod drive;

#[test]
fn every_configuration_is_understood_or_refused() {
    drive::drive("cni_config", cni_config::run, &[], 10_000);
}
