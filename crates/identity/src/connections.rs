//! Has what connections have done counted that are open: of identities that have TCP only, whose packets nothing counts.
//!
//! The program that does so is pinned beside the maps. Whoever reads its pin has it run.

use std::{fs::File, io, path::Path};

use aya::{
    Btf, EbpfLoader,
    programs::{Iter, links::FdLink},
};

use crate::{
    Error,
    maps::SHARED_WITH_CONNECTIONS,
    programs::{NotThere, failed, remove_file},
};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/open.o"));
/// Name of the program, and of its pin.
const COUNT: &str = "on_tcp";

/// Looks through all TCP sockets of the calling thread's network namespace, and adds to the tallies of the identities what those
/// have done since the last time.
///
/// # Errors
/// As of [`prepare`].
pub(crate) fn count(folder: &Path) -> Result<(), Error> {
    prepare(folder)?;
    let pin = folder.join(COUNT);
    let read = File::open(&pin).and_then(|mut file| io::copy(&mut file, &mut io::sink()));
    read.map_err(|error| Error::system("read", pin.display().to_string(), error))?;
    Ok(())
}

/// Pins the program, unless that was done.
///
/// # Errors
/// The kernel doesn't tell its types (`CONFIG_DEBUG_INFO_BTF`), or refuses.
pub(crate) fn prepare(folder: &Path) -> Result<(), Error> {
    let pin = folder.join(COUNT);
    if pin.exists() {
        return Ok(());
    }
    let pinned = load(OBJECT, Some(folder)).and_then(|link| Ok(link.pin(&pin)?));
    pinned
        .map(drop)
        .map_err(|error| failed(&format!("pin {}", pin.display()), error))
}

/// Has the program of this build in place of another one.
///
/// # Errors
/// As of [`prepare`].
pub(crate) fn renew(folder: &Path) -> Result<(), Error> {
    forget(folder)?;
    prepare(folder)
}

/// Lets go of the program.
pub(crate) fn forget(folder: &Path) -> Result<(), Error> {
    remove_file(&folder.join(COUNT))
}

/// Whether the kernel takes the program, with maps of its own.
pub(crate) fn probe() -> Result<(), Error> {
    probe_object(OBJECT)
}

fn probe_object(object: &[u8]) -> Result<(), Error> {
    load(object, None)
        .map(drop)
        .map_err(|error| failed("look through the open connections", error))
}

/// The program, attached; its maps are those in the folder.
fn load(
    object: &[u8],
    folder: Option<&Path>,
) -> Result<FdLink, Box<dyn std::error::Error + Send + Sync>> {
    let types = Btf::from_sys_fs()?;
    let mut loader = EbpfLoader::new();
    loader.btf(Some(&types));
    if let Some(folder) = folder {
        for name in SHARED_WITH_CONNECTIONS {
            loader.map_pin_path(name, folder.join(name));
        }
    }
    let mut loaded = loader.load(object)?;
    let program = loaded.program_mut(COUNT).ok_or(NotThere)?;
    let program: &mut Iter = program.try_into()?;
    program.load("tcp", &types)?;
    let link = program.attach()?;
    Ok(program.take_link(link)?.try_into()?)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use sandwire_bpf_compiler::Compiler;
    use sandwire_testlab::lab;

    use super::probe_object;

    /// As that of the other programs.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn the_kernel_takes_what_every_clang_makes_of_the_counting_program() {
        lab::run(|_| {
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
            let headers = format!("-I{}", sources.display());
            for compiler in Compiler::versions() {
                let objects = tempfile::tempdir().unwrap();
                compiler
                    .compile_all(&sources, objects.path(), &[&headers])
                    .unwrap();
                let object = fs::read(objects.path().join("open.o")).unwrap();
                let probed = probe_object(&object);
                probed.unwrap_or_else(|error| panic!("{}: {error:?}", compiler.name()));
            }
        });
    }
}
