//! A program of the product of another version: it does the same by the same maps, and the kernel knows it by another tag.
//!
//! Compiled by clang from the product's source with a call that has no effect, and loaded by a loader of its own. Of what a daemon
//! says to its programs it has only how large maps are: without the rest it does with less of the kernel's help.

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use aya::{
    EbpfLoader,
    maps::MapData,
    programs::{ProgramFd, SchedClassifier},
};

use crate::command;

/// Where the product's programs are.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../datapath/bpf");

/// A loaded program of tc; it stays loaded for as long as this, or an interface that has it.
#[derive(Debug)]
pub struct OlderProgram(ProgramFd);

impl OlderProgram {
    /// Compiles the C file of this name into `folder` and loads a program of it, by the maps that are pinned in `maps`.
    ///
    /// # Errors
    /// If there are no such file, program or maps, or clang or the verifier refuses it.
    pub fn load(folder: &Path, maps: &Path, file: &str, name: &str) -> Result<Self> {
        let object = compile(folder, file, name)?;
        let nics = entries_of(maps, "nics")?;
        // One line of each is the daemon's.
        let processors = entries_of(maps, "ledgers")? / nics - 1;
        let mut loaded = EbpfLoader::new()
            .btf(None)
            .default_map_pin_directory(maps)
            .override_global("nics_max", &nics, false)
            .override_global("processors", &processors, false)
            .load_file(&object)
            .with_context(|| format!("load {}", object.display()))?;
        let program: &mut SchedClassifier = loaded
            .program_mut(name)
            .with_context(|| format!("{file} has no {name}"))?
            .try_into()?;
        program.load().with_context(|| format!("load {name}"))?;
        Ok(Self(program.fd()?.try_clone()?))
    }
}

impl AsFd for OlderProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn entries_of(maps: &Path, name: &str) -> Result<u32> {
    let map = MapData::from_pin(maps.join(name)).with_context(|| format!("open the map {name}"))?;
    Ok(map.info()?.max_entries())
}

fn compile(folder: &Path, file: &str, name: &str) -> Result<PathBuf> {
    let source = Path::new(SOURCES).join(format!("{file}.bpf.c"));
    let text = fs::read_to_string(&source).with_context(|| format!("read {}", source.display()))?;
    let head = format!("int {name}(struct __sk_buff *skb)\n{{\n");
    ensure!(
        text.matches(&head).count() == 1,
        "{} has no program {name}",
        source.display()
    );
    let changed = text.replace(&head, &format!("{head}\t(void)bpf_get_prandom_u32();\n"));
    let (source, object) = (
        folder.join(format!("{name}.bpf.c")),
        folder.join(format!("{name}.o")),
    );
    fs::write(&source, changed).with_context(|| format!("write {}", source.display()))?;
    let architecture = std::env::consts::ARCH;
    command::output_of(
        Command::new("clang")
            .args([
                "-target",
                "bpf",
                "-mcpu=v3",
                "-O2",
                "-g",
                "-std=gnu11",
                "-c",
            ])
            .arg(format!("-I/usr/include/{architecture}-linux-gnu"))
            .arg(format!("-I{SOURCES}/lib"))
            .arg(&source)
            .arg("-o")
            .arg(&object),
    )?;
    Ok(object)
}
