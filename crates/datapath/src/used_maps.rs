//! By which maps a program goes that somebody has loaded.
//!
//! Copies of one version have the same instructions, and the same hash of them, whatever maps they go by: it leaves
//! those out. So it takes the kernel's list of a program's maps to tell whether what is written here reaches it.

use std::{io, os::fd::AsFd};

use crate::{Datapath, Error, Program, sys};

impl Datapath {
    /// Whether a program goes by no maps but those in use, given its number. It may be of another process, or of a
    /// version that lacks some of them. Constants, of which each copy has its own map, don't count.
    ///
    /// # Errors
    /// The kernel refuses, or there is no such program any more.
    pub fn shares_maps(&self, id: u32) -> Result<bool, Error> {
        let compare = || -> io::Result<bool> {
            let mut others = sys::program_maps(sys::program_of(id)?.as_fd())?;
            others.retain(|map| !self.maps.contains(map));
            for map in others {
                if !sys::map_info(sys::map_of(map)?.as_fd())?.is_section() {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        compare().map_err(|source| failed(id, source))
    }

    /// Whether a program is one of ours, of whatever start or instance, given its number: by its name, since every version
    /// has other instructions.
    ///
    /// # Errors
    /// The kernel refuses, or there is no such program any more.
    pub fn is_ours(&self, id: u32, program: Program) -> Result<bool, Error> {
        sys::program_of(id)
            .and_then(|found| sys::is_program_named(found.as_fd(), program.name()))
            .map_err(|source| failed(id, source))
    }
}

fn failed(id: u32, source: io::Error) -> Error {
    Error::system("look at", format!("the program {id}"), source)
}
