//! By which maps a program goes that somebody has loaded.
//!
//! Copies of one version have the same instructions, and the same hash of them, whatever maps they go by: it leaves
//! those out. So it takes the kernel's list of a program's maps to tell whether what is written here reaches it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use crate::{Datapath, Error, Program, sys};

impl Datapath {
    /// Whether a program goes by the maps in use as our copy does, given its number. It may be of another process or
    /// version. Constants, of which each copy has its own map, don't count.
    ///
    /// # Errors
    /// The kernel refuses, or there is no such program any more.
    pub fn shares_maps(&self, program: Program, id: u32) -> Result<bool, Error> {
        let compare = || -> io::Result<bool> {
            let wanted = self.shared_maps(self.program(program))?;
            let found = self.shared_maps(sys::program_of(id)?.as_fd())?;
            Ok(wanted.iter().all(|map| found.contains(map)))
        };
        compare().map_err(|source| Error::system("look at", format!("the program {id}"), source))
    }

    /// The numbers of the maps in use that a program has.
    fn shared_maps(&self, program: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
        let mut maps = sys::program_maps(program)?;
        maps.retain(|map| self.maps.contains(map));
        Ok(maps)
    }
}
