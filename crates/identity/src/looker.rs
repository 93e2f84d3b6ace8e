//! Programs that look through all sockets of a network namespace. They are pinned beside the maps; whoever reads such a pin has
//! the program run.

use std::{fs::File, io, path::Path};

use aya::{
    Btf, EbpfLoader,
    programs::{Iter, links::FdLink},
};

use crate::{
    Error,
    loading::{NotThere, failed},
    programs::remove_file,
};

/// A program that looks through sockets.
pub(crate) struct Looker {
    /// Of the program, and of its pin.
    pub(crate) name: &'static str,
    pub(crate) object: &'static [u8],
    /// What the kernel calls the list that it looks through.
    pub(crate) list: &'static str,
    /// Its maps, which are those of the other programs.
    pub(crate) maps: &'static [&'static str],
}

impl Looker {
    /// Has it look through the sockets of the calling thread's network namespace.
    ///
    /// # Errors
    /// As of [`Looker::prepare`].
    pub(crate) fn run(&self, folder: &Path) -> Result<(), Error> {
        self.prepare(folder)?;
        self.run_if_pinned(folder)
    }

    /// The same, if it is pinned.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn run_if_pinned(&self, folder: &Path) -> Result<(), Error> {
        let pin = folder.join(self.name);
        let read = File::open(&pin).and_then(|mut file| io::copy(&mut file, &mut io::sink()));
        match read {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::system("read", pin.display().to_string(), error)),
        }
    }

    /// Whether whoever reads the pin has it run.
    pub(crate) fn is_pinned(&self, folder: &Path) -> bool {
        folder.join(self.name).exists()
    }

    /// Pins the program, unless that was done.
    ///
    /// # Errors
    /// The kernel doesn't tell its types (`CONFIG_DEBUG_INFO_BTF`), or refuses.
    pub(crate) fn prepare(&self, folder: &Path) -> Result<(), Error> {
        if self.is_pinned(folder) {
            return Ok(());
        }
        let pin = folder.join(self.name);
        let pinned = self.load(self.object, Some(folder));
        pinned
            .and_then(|link| Ok(link.pin(&pin)?))
            .map(drop)
            .map_err(|error| failed(&format!("pin {}", pin.display()), error))
    }

    /// Has the program of this build in place of another one.
    ///
    /// # Errors
    /// As of [`Looker::prepare`].
    pub(crate) fn renew(&self, folder: &Path) -> Result<(), Error> {
        self.forget(folder)?;
        self.prepare(folder)
    }

    /// Lets go of the program.
    pub(crate) fn forget(&self, folder: &Path) -> Result<(), Error> {
        remove_file(&folder.join(self.name))
    }

    /// Whether the kernel takes the program, with maps of its own.
    pub(crate) fn probe(&self) -> Result<(), Error> {
        self.probe_object(self.object)
    }

    /// The same for what another compiler has made of it.
    pub(crate) fn probe_object(&self, object: &[u8]) -> Result<(), Error> {
        self.load(object, None)
            .map(drop)
            .map_err(|error| failed(&format!("look through sockets ({})", self.name), error))
    }

    /// The program, attached; its maps are those in the folder.
    fn load(
        &self,
        object: &[u8],
        folder: Option<&Path>,
    ) -> Result<FdLink, Box<dyn std::error::Error + Send + Sync>> {
        let types = Btf::from_sys_fs()?;
        let mut loader = EbpfLoader::new();
        loader.btf(Some(&types));
        if let Some(folder) = folder {
            for name in self.maps {
                loader.map_pin_path(name, folder.join(name));
            }
        }
        let mut loaded = loader.load(object)?;
        let program = loaded.program_mut(self.name).ok_or(NotThere)?;
        let program: &mut Iter = program.try_into()?;
        program.load(self.list, &types)?;
        let link = program.attach()?;
        Ok(program.take_link(link)?.try_into()?)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use sandwire_bpf_compiler::Compiler;
    use sandwire_testlab::lab;

    use crate::{connections, receivers};

    /// As that of the other programs.
    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn the_kernel_takes_what_every_clang_makes_of_the_looking_programs() {
        lab::run(|_| {
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
            let headers = format!("-I{}", sources.display());
            for compiler in Compiler::versions() {
                let objects = tempfile::tempdir().unwrap();
                compiler
                    .compile_all(&sources, objects.path(), &[&headers])
                    .unwrap();
                for (looker, object) in [
                    (&connections::LOOKER, "open.o"),
                    (&receivers::LOOKER, "receivers.o"),
                ] {
                    let object = fs::read(objects.path().join(object)).unwrap();
                    let probed = looker.probe_object(&object);
                    probed.unwrap_or_else(|error| panic!("{}: {error:?}", compiler.name()));
                }
            }
        });
    }
}
