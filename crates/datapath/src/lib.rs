//! The eBPF data path: its programs, the maps that they share with the daemon, loading and attaching.
