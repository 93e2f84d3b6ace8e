//! A file that grows by records, and ends with a whole one whatever happens to its disk.
//!
//! Bytes arrive cut anywhere, as from a socket; only whole records are written, many at a time. Where the rest
//! of a write finds no room, a regular file is cut back to the last record that has arrived there whole. What is
//! no regular file, such as a pipe, can't be cut back; its reader sees the end.

use std::{
    fs::File,
    io::{self, ErrorKind, Seek, Write},
    os::fd::AsFd,
    path::Path,
};

use crate::patient::Patient;

/// How many of these bytes are whole records. They begin with one; if they are the first of the file, with
/// whatever begins a file.
pub(crate) type WholeRecords = fn(bytes: &[u8], at_beginning: bool) -> usize;

/// A file of records.
#[derive(Debug)]
pub(crate) struct RecordFile {
    file: Patient<File>,
    is_regular: bool,
    whole: WholeRecords,
    /// The beginning of a record that has not arrived whole.
    begun: Vec<u8>,
    /// Bytes of whole records in the file.
    written: u64,
}

impl RecordFile {
    /// Creates or empties the file; `-` is standard output.
    pub(crate) fn create(path: &Path, whole: WholeRecords) -> io::Result<Self> {
        let file = if path == Path::new("-") {
            File::from(io::stdout().as_fd().try_clone_to_owned()?)
        } else {
            File::create(path)?
        };
        Self::new(file, whole)
    }

    fn new(file: File, whole: WholeRecords) -> io::Result<Self> {
        Ok(Self {
            is_regular: file.metadata()?.is_file(),
            file: Patient(file),
            whole,
            begun: Vec::new(),
            written: 0,
        })
    }

    /// Takes bytes and writes what they complete, at once: who reads along sees records when they come.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.begun.extend_from_slice(bytes);
        let end = (self.whole)(&self.begun, self.written == 0);
        let mut arrived = 0;
        while arrived < end {
            match self.file.write(&self.begun[arrived..end]) {
                Ok(0) => return self.cut_back(arrived, ErrorKind::WriteZero.into()),
                Ok(count) => arrived += count,
                Err(error) => return self.cut_back(arrived, error),
            }
        }
        self.begun.drain(..end);
        self.written += end as u64;
        Ok(())
    }

    /// Bytes of whole records in the file.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Takes off what has arrived of a record that can't be finished. Returns why it can't.
    fn cut_back(&mut self, arrived: usize, reason: io::Error) -> io::Result<()> {
        let whole = (self.whole)(&self.begun[..arrived], self.written == 0);
        self.written += whole as u64;
        self.begun.clear();
        if self.is_regular && whole < arrived {
            // Standard output may have been appended to, so the end is asked for.
            let end = self.file.0.stream_position()?;
            let length = end.saturating_sub((arrived - whole) as u64);
            self.file.0.set_len(length).map_err(|error| {
                let text = format!("{reason}; and what was cut off can't be taken off: {error}");
                io::Error::new(reason.kind(), text)
            })?;
        }
        Err(reason)
    }
}

impl Write for RecordFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.add(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// After a first byte, records of a length byte and as many bytes.
    fn whole(bytes: &[u8], at_beginning: bool) -> usize {
        let mut at = usize::from(at_beginning).min(bytes.len());
        while let Some(length) = bytes.get(at) {
            let next = at + 1 + usize::from(*length);
            if next > bytes.len() {
                break;
            }
            at = next;
        }
        at
    }

    #[test]
    fn only_whole_records_are_written_however_they_come() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records");
        let records = [9, 3, 1, 2, 3, 0, 2, 8, 9, 4, 1, 2];
        let ends = [0, 1, 5, 6, 9];
        for split in 0..=records.len() {
            let mut file = RecordFile::create(&path, whole).unwrap();
            let (first, second) = records.split_at(split);
            file.add(first).unwrap();
            let end = ends.iter().rfind(|end| **end <= split).unwrap();
            assert_eq!(fs::read(&path).unwrap(), records[..*end]);
            file.add(second).unwrap();
            assert_eq!(fs::read(&path).unwrap(), records[..9]);
            assert_eq!(file.written(), 9);
        }
    }

    #[test]
    fn what_is_no_file_is_written_to_and_not_cut() {
        let (mut reader, writer) = io::pipe().unwrap();
        let writer = File::from(std::os::fd::OwnedFd::from(writer));
        let mut file = RecordFile::new(writer, whole).unwrap();
        file.add(&[9, 1, 7, 2, 8]).unwrap();
        drop(file);
        let mut read = Vec::new();
        io::Read::read_to_end(&mut reader, &mut read).unwrap();
        assert_eq!(read, [9, 1, 7]);
        let full = fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let mut file = RecordFile::new(full, whole).unwrap();
        let error = file.add(&[9, 1, 7]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert_eq!(file.written(), 0);
    }
}
