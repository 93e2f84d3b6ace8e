//! Compiles the programs under `bpf/`.

use std::{env, path::PathBuf};

use sandwire_bpf_compiler::{Compiler, Error};

fn main() {
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    compile().unwrap_or_else(|error| panic!("{error}"));
}

fn compile() -> Result<(), Error> {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    Compiler::find()?.compile_all("bpf".as_ref(), &out, &["-Ibpf"])
}
