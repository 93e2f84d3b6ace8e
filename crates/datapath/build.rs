//! Compiles the programs under `bpf/` with clang, one object per attach point.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Any of these will do; the newest first.
const COMPILERS: [&str; 5] = ["clang", "clang-19", "clang-16", "clang-15", "clang-14"];

fn main() {
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let compiler = find_compiler();
    // A test compiles the header alone.
    println!("cargo::rustc-env=SANDWIRE_CLANG={compiler}");
    for source in sources(Path::new("bpf")) {
        compile(&compiler, &source, &out);
    }
}

fn find_compiler() -> String {
    let named = env::var("CLANG").ok();
    let works = |name: &String| {
        let version = Command::new(name).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    };
    let found = named
        .into_iter()
        .chain(COMPILERS.map(str::to_owned))
        .find(works);
    found.expect(
        "no clang found: the eBPF programs are compiled by clang 14 or newer; \
         install the Debian package clang (cargo xtask setup does), or name one by CLANG=",
    )
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder bpf is part of the package");
    let mut sources: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension() == Some(OsStr::new("c")))
        .collect();
    sources.sort();
    sources
}

fn compile(compiler: &str, source: &Path, out: &Path) {
    let stem = source.file_stem().expect("a C file has a name");
    let object = out.join(stem).with_extension("o");
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let mut command = Command::new(compiler);
    command
        .args(["-target", "bpf", "-mcpu=v3", "-O2", "-g"])
        .args(["-Wall", "-Wextra", "-Werror", "-std=gnu11"])
        .arg("-I")
        .arg("bpf/lib")
        // <linux/types.h> includes <asm/types.h>, which Debian keeps in a folder per architecture.
        .arg(format!("-I/usr/include/{architecture}-linux-gnu"))
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(&object);
    let output = command.output().expect("clang was found a moment ago");
    assert!(
        output.status.success(),
        "clang can't compile {}:\n{}\n(headers come from the Debian packages libbpf-dev and linux-libc-dev)",
        source.display(),
        String::from_utf8_lossy(&output.stderr)
    );
}
