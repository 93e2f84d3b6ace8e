//! Programs that another clang has compiled: the verifier judges what a compiler makes of them, and the next Debian has another
//! one.

use std::{fs, path::Path, time::Duration};

use sandwire_bpf_compiler::Compiler;
use sandwire_testlab::{
    guest::kernel::Series,
    lab::{self, FILES},
};

use super::settings;
use crate::{
    divert,
    features::{self, Features},
    open::{OBJECTS, Object, load, sizes},
    pins::{current, find_bpffs, make_folder},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_kernel_takes_what_every_clang_makes_of_the_programs() {
    lab::run(|_| {
        let compilers = Compiler::versions();
        assert!(!compilers.is_empty(), "no clang-14, clang-19 or other");
        let with_all = features::probe().unwrap();
        for compiler in compilers {
            let objects = tempfile::tempdir().unwrap();
            compile(&compiler, objects.path());
            for features in [with_all, Features::default()] {
                try_all(compiler.name(), objects.path(), features);
            }
        }
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn linux_6_1_takes_what_the_newest_clang_makes_of_the_programs() {
    lab::run_on_with(Series::Linux6_1, DEADLINE, compile_by_newest, |_| {
        try_newest();
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn linux_6_12_takes_what_the_newest_clang_makes_of_the_programs() {
    lab::run_on_with(Series::Linux6_12, DEADLINE, compile_by_newest, |_| {
        try_newest();
    });
}

const DEADLINE: Duration = Duration::from_secs(300);

fn compile_by_newest(out: &Path) {
    compile(Compiler::versions().last().unwrap(), out);
}

fn try_newest() {
    for features in [features::probe().unwrap(), Features::default()] {
        try_all("the newest clang", FILES.as_ref(), features);
    }
}

fn compile(compiler: &Compiler, out: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
    let headers = format!("-I{}", sources.join("lib").display());
    compiler.compile_all(&sources, out, &[&headers]).unwrap();
}

/// Loads all programs as the product does, and takes them away again.
fn try_all(compiler: &str, objects: &Path, features: Features) {
    let mut settings = settings();
    settings.folder = settings.folder.with_file_name("compilers");
    let folder = &settings.folder;
    find_bpffs(folder, settings.mount).unwrap();
    make_folder(&current(folder).join("programs")).unwrap();
    let all: Vec<_> = OBJECTS.iter().map(|own| read(objects, own.name)).collect();
    let sizes = sizes(&settings).unwrap();
    let loaded = load(folder, &sizes, features, &all);
    loaded.unwrap_or_else(|error| panic!("{compiler}, {features:?}: {error}"));
    let loaded = divert::load(folder, &read(objects, "divert"));
    loaded.unwrap_or_else(|error| panic!("{compiler}: {error}"));
    fs::remove_dir_all(folder).unwrap();
}

/// Objects live as long as the process, as the product's own do.
fn read(folder: &Path, name: &'static str) -> Object {
    let bytes = fs::read(folder.join(name).with_extension("o")).unwrap();
    Object {
        name,
        bytes: bytes.leak(),
    }
}
