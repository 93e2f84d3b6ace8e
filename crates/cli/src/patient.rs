//! Standard input and output that somebody has made non-blocking, read and written as if nobody had.
//!
//! Whether a descriptor blocks is a matter of all who share it: an ssh on the same terminal, or whoever gave us the
//! other end of a pair of sockets. Where a call would have blocked, it is waited for.

use std::{
    io::{self, Read, Write},
    os::fd::AsFd,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

/// A descriptor whose reads and writes wait, and go straight to it: a read is one of the kernel's, and so is a write that
/// finds room for all.
#[derive(Debug)]
pub(crate) struct Patient<F>(pub(crate) F);

impl<F: AsFd> Read for Patient<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.0, &mut *buffer) {
                Err(Errno::AGAIN) => wait(&self.0, PollFlags::IN)?,
                Err(Errno::INTR) => {}
                outcome => return Ok(outcome?),
            }
        }
    }
}

impl<F: AsFd> Write for Patient<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.0, bytes) {
                Err(Errno::AGAIN) => wait(&self.0, PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                outcome => return Ok(outcome?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Until the next attempt says something else.
fn wait(fd: impl AsFd, flags: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(&fd, flags)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, thread, time::Duration};

    use super::*;

    #[test]
    fn all_that_comes_late_is_read_and_all_that_is_too_much_is_written() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let bytes: Vec<u8> = (0..1_000_000_u32)
            .map(|number| number.to_le_bytes()[0])
            .collect();
        let (asked, expected) = (bytes.clone(), bytes.clone());
        let other = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            ours.write_all(&asked).unwrap();
            thread::sleep(Duration::from_millis(100));
            let mut answer = vec![0; asked.len()];
            ours.read_exact(&mut answer).unwrap();
            answer
        });
        let mut patient = Patient(theirs);
        let mut read = vec![0; bytes.len()];
        patient.read_exact(&mut read).unwrap();
        assert!(read == expected);
        patient.write_all(&bytes).unwrap();
        assert!(other.join().unwrap() == expected);
    }

    #[test]
    fn an_end_and_a_reader_that_is_gone_are_told() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        drop(ours);
        let mut patient = Patient(theirs);
        assert_eq!(patient.read(&mut [0; 9]).unwrap(), 0);
        let error = patient.write(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
