//! Compiles BPF programs by clang: C files become objects, one each, that are embedded in a crate.
//!
//! For build scripts, and for tests that compile what they have changed. There is no stub where clang is
//! missing: the error names what to install.

use std::{
    env,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// Why there is no object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No clang works.
    #[error(
        "find clang: none works, and eBPF programs are compiled by clang 14 or newer; install the Debian \
         package clang (cargo xtask setup does), or name one by CLANG="
    )]
    NoCompiler,
    /// A folder of sources can't be read.
    #[error("list the sources in {}: {source}", folder.display())]
    List {
        /// Where they should be.
        folder: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// clang can't be started.
    #[error("start {compiler}: {source}")]
    Start {
        /// Its name.
        compiler: String,
        /// What the system says.
        source: io::Error,
    },
    /// clang refuses a source.
    #[error(
        "compile {}:\n{messages}\n(headers come from the Debian packages libbpf-dev and linux-libc-dev)",
        source_file.display()
    )]
    Refused {
        /// What it was to compile.
        source_file: PathBuf,
        /// What it says.
        messages: String,
    },
}

/// A clang that works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiler {
    name: String,
}

impl Compiler {
    /// Finds clang: the one that the environment variable `CLANG` names, or one on the PATH.
    ///
    /// # Errors
    /// If none works.
    pub fn find() -> Result<Self, Error> {
        let named = env::var("CLANG").ok();
        let known = COMPILERS.map(str::to_owned);
        let found = named.into_iter().chain(known).find(|name| works(name));
        let name = found.ok_or(Error::NoCompiler)?;
        Ok(Self { name })
    }

    /// Every clang of a version of its own on the PATH, such as `clang-14`, oldest first.
    #[must_use]
    pub fn versions() -> Vec<Self> {
        let names = (OLDEST..NEWEST).map(|version| format!("clang-{version}"));
        names
            .filter(|name| works(name))
            .map(|name| Self { name })
            .collect()
    }

    /// Its name, as the shell knows it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compiles every C file of a folder to an object in another: `pass.bpf.c` to `pass.o`.
    ///
    /// # Errors
    /// If the folder can't be read, or clang refuses one of them.
    pub fn compile_all(&self, sources: &Path, out: &Path, more: &[&str]) -> Result<(), Error> {
        let listed = |source| Error::List {
            folder: sources.to_owned(),
            source,
        };
        for entry in fs::read_dir(sources).map_err(listed)? {
            let source = entry.map_err(listed)?.path();
            let (Some(stem), Some("c")) = (
                source.file_stem(),
                source.extension().and_then(OsStr::to_str),
            ) else {
                continue;
            };
            self.compile(&source, &out.join(stem).with_extension("o"), more)?;
        }
        Ok(())
    }

    /// Compiles one C file, with more arguments to clang. Warnings are errors unless those say otherwise.
    ///
    /// # Errors
    /// If clang refuses it.
    pub fn compile(&self, source: &Path, object: &Path, more: &[&str]) -> Result<(), Error> {
        // That of the machine that compiles: what the programs use of it is the same in all of 64 bits, and the
        // headers of another, for which a build script may work, aren't there.
        let architecture = env::consts::ARCH;
        let output = Command::new(&self.name)
            .args(["-target", "bpf", "-mcpu=v3", "-O2", "-g"])
            .args(["-Wall", "-Wextra", "-Werror", "-std=gnu11"])
            // <linux/types.h> includes <asm/types.h>, which Debian keeps in a folder per architecture.
            .arg(format!("-I/usr/include/{architecture}-linux-gnu"))
            .args(more)
            .arg("-c")
            .arg(source)
            .arg("-o")
            .arg(object)
            .output()
            .map_err(|error| Error::Start {
                compiler: self.name.clone(),
                source: error,
            })?;
        if output.status.success() {
            return Ok(());
        }
        Err(Error::Refused {
            source_file: source.to_owned(),
            messages: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}

fn works(name: &str) -> bool {
    let version = Command::new(name).arg("--version").output();
    version.is_ok_and(|output| output.status.success())
}

/// Any of these will do; after the one that is the machine's own, the newest first.
const COMPILERS: [&str; 5] = ["clang", "clang-19", "clang-16", "clang-15", "clang-14"];
/// Versions that are looked for by name.
const OLDEST: u32 = 14;
const NEWEST: u32 = 40;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
mod tests {
    use super::*;

    #[test]
    fn each_c_file_becomes_an_object_and_nothing_else_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("one.bpf.c"), "int one(void) { return 1; }").unwrap();
        fs::write(path("two.h"), "no C at all").unwrap();
        let compiler = Compiler::find().unwrap();
        compiler
            .compile_all(folder.path(), folder.path(), &[])
            .unwrap();
        assert!(fs::read(path("one.o")).unwrap().starts_with(b"\x7fELF"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_warning_is_an_error_unless_it_is_waived() {
        let folder = tempfile::tempdir().unwrap();
        let (source, object) = (folder.path().join("odd.c"), folder.path().join("odd.o"));
        fs::write(&source, "static int unused(void) { return 1; }").unwrap();
        let compiler = Compiler::find().unwrap();
        let refused = compiler.compile(&source, &object, &[]).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("odd.c") && text.contains("unused"), "{text}");
        compiler.compile(&source, &object, &["-w"]).unwrap();
    }
}
