//! Compiles the programs under `bpf/`, which some rows compare with.

use std::{env, path::PathBuf};

use sandwire_bpf_compiler::Compiler;

fn main() {
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let compiled =
        Compiler::find().and_then(|compiler| compiler.compile_all("bpf".as_ref(), &out, &[]));
    compiled.unwrap_or_else(|error| panic!("{error}"));
}
