//! Live captures, as pcap files of LINKTYPE_VSOCK (271) that Wireshark and tcpdump read.
//!
//! A record is the 32-byte header of Linux's vsockmon (`struct af_vsockmon_hdr`), the 44-byte header of
//! virtio, and the payload up to the snap length. Guests whose device is ours give the packets of their
//! virtqueues; for relays of hybrid VMMs, whose packets we never see, the same headers are made up from what
//! the relay does.
//!
//! Whoever records only copies into a bounded queue; one thread writes the queues of all captures. A queue
//! that is full drops and counts. A full disk or a reader that went away ends that capture alone, with a
//! reason.

use std::{
    fs::File,
    io::{self, Seek},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat, ftruncate},
    io::Errno,
};

use crate::{
    readiness::{Waker, timespec},
    statistics::VmCounters,
};

/// Length of a virtio vsock header.
pub const VIRTIO_HEADER: usize = 44;
/// Longest payload of a record where nothing else is asked for: a whole packet.
pub const SNAP_LENGTH: u32 = 64 * 1024;
/// Bytes that wait to be written, per capture. More are dropped and counted.
const QUEUE_MAX: usize = 4 * 1024 * 1024;
const LINKTYPE_VSOCK: u32 = 271;
const FILE_HEADER: usize = 24;
const MONITOR_HEADER: usize = 32;
const RECORD_HEADER: usize = 16;

/// Where packets of a guest are recorded.
#[derive(Debug)]
pub struct Sink {
    snap: usize,
    queue: Mutex<Vec<u8>>,
    recorded: AtomicU64,
    dropped: AtomicU64,
    /// The guest's, who counts the same over all captures.
    counters: Arc<VmCounters>,
    /// Whether nobody wants more.
    over: AtomicBool,
    reason: Mutex<Option<String>>,
    wake: Arc<Waker>,
}

/// What became of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Packets that were written or wait to be.
    pub recorded: u64,
    /// Packets that weren't, as the queue was full.
    pub dropped: u64,
    /// Why it ended before it was told to; none while it runs.
    pub reason: Option<String>,
}

impl Sink {
    /// Records a packet: its header as it is in the virtqueue, and its payload, in as many pieces as it has.
    /// Never waits.
    pub fn record(&self, header: &[u8; VIRTIO_HEADER], payload: &[&[u8]]) {
        if self.over.load(Ordering::Relaxed) {
            return;
        }
        let length: usize = payload.iter().map(|piece| piece.len()).sum();
        let kept = length.min(self.snap);
        let whole = MONITOR_HEADER + VIRTIO_HEADER;
        let mut queue = lock(&self.queue);
        if queue.len() + RECORD_HEADER + whole + kept > QUEUE_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            let of_all = &self.counters.capture_dropped_packets;
            of_all.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let was_empty = queue.is_empty();
        put_record_header(&mut queue, whole + kept, whole + length);
        put_monitor_header(&mut queue, header);
        queue.extend_from_slice(header);
        let mut left = kept;
        for piece in payload {
            let piece = &piece[..piece.len().min(left)];
            queue.extend_from_slice(piece);
            left -= piece.len();
        }
        drop(queue);
        self.recorded.fetch_add(1, Ordering::Relaxed);
        if was_empty {
            self.wake.wake();
        }
    }

    /// How it is going.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        Outcome {
            recorded: self.recorded.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
            reason: lock(&self.reason).clone(),
        }
    }

    /// Ends it; what waits is still written.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        self.wake.wake();
    }

    /// Ends it although whoever asked for it hasn't, and says why.
    pub fn end_because(&self, reason: &str) {
        self.fail(reason.to_owned());
        self.wake.wake();
    }

    fn fail(&self, reason: String) {
        lock(&self.reason).get_or_insert(reason);
        self.over.store(true, Ordering::Relaxed);
    }
}

fn put_record_header(into: &mut Vec<u8>, kept: usize, length: usize) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
    for field in [
        seconds,
        now.subsec_nanos(),
        length_of(kept),
        length_of(length),
    ] {
        into.extend_from_slice(&field.to_le_bytes());
    }
}

/// Lengths here are bounded by packets, far below 4 GiB.
fn length_of(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// `struct af_vsockmon_hdr` of include/uapi/linux/vsockmon.h, little-endian throughout.
fn put_monitor_header(into: &mut Vec<u8>, header: &[u8; VIRTIO_HEADER]) {
    // Connect, disconnect, control and payload; virtio's operations are those of virtio_vsock.h.
    let operation: u16 = match u16::from_le_bytes([header[30], header[31]]) {
        1 | 2 => 1,
        3 | 4 => 2,
        5 => 4,
        6 | 7 => 3,
        _ => 0,
    };
    const TRANSPORT_VIRTIO: u16 = 2;
    const VIRTIO_HEADER_16: u16 = 44;
    // CIDs and ports stand in the same order and width in both.
    into.extend_from_slice(&header[..24]);
    into.extend_from_slice(&operation.to_le_bytes());
    into.extend_from_slice(&TRANSPORT_VIRTIO.to_le_bytes());
    into.extend_from_slice(&VIRTIO_HEADER_16.to_le_bytes());
    into.extend_from_slice(&[0, 0]);
}

fn file_header(snap: usize) -> Vec<u8> {
    /// Nanoseconds.
    const MAGIC: u32 = 0xa1b2_3c4d;
    const VERSION: u32 = 4 << 16 | 2;
    let longest = length_of(snap + MONITOR_HEADER + VIRTIO_HEADER);
    [MAGIC, VERSION, 0, 0, longest, LINKTYPE_VSOCK]
        .iter()
        .flat_map(|field| field.to_le_bytes())
        .collect()
}

/// The thread that writes all captures.
#[derive(Debug)]
pub struct Captures {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    wake: Arc<Waker>,
    /// Told when a capture has ended by itself.
    ended: Arc<Waker>,
    new: Mutex<Vec<Output>>,
    stop: AtomicBool,
}

/// One capture as its writer has it.
#[derive(Debug)]
struct Output {
    sink: Arc<Sink>,
    file: File,
    regular: bool,
    /// What was taken from the queue, and how much of that is written.
    taken: Vec<u8>,
    written: usize,
}

impl Captures {
    /// Starts the thread. `ended` is woken whenever a capture ends by itself.
    ///
    /// # Errors
    /// Of `eventfd` and of starting a thread.
    pub fn spawn(ended: Arc<Waker>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            wake: Arc::new(Waker::new()?),
            ended,
            new: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
        });
        let theirs = shared.clone();
        let thread = thread::Builder::new()
            .name("vsock-capture".to_owned())
            .spawn(move || write_all(&theirs))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Begins a capture into a file, a pipe or a socket, which becomes non-blocking unless it is a file. What it has no
    /// room for counts among the guest's.
    ///
    /// # Errors
    /// What the kernel says about the descriptor.
    pub fn start(
        &self,
        fd: OwnedFd,
        snap: u32,
        counters: Arc<VmCounters>,
    ) -> io::Result<Arc<Sink>> {
        let regular = FileType::from_raw_mode(fstat(&fd)?.st_mode) == FileType::RegularFile;
        let flags = fcntl_getfl(&fd)?;
        if !flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            return Err(Errno::BADF.into());
        }
        if !regular {
            fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        }
        let snap = snap as usize;
        let sink = Arc::new(Sink {
            snap,
            queue: Mutex::new(file_header(snap)),
            recorded: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            counters,
            over: AtomicBool::new(false),
            reason: Mutex::new(None),
            wake: self.shared.wake.clone(),
        });
        lock(&self.shared.new).push(Output {
            sink: sink.clone(),
            file: fd.into(),
            regular,
            taken: Vec::new(),
            written: 0,
        });
        self.shared.wake.wake();
        Ok(sink)
    }
}

impl Drop for Captures {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Until it is told to stop: writes what there is, waits.
fn write_all(shared: &Shared) {
    let mut outputs: Vec<Output> = Vec::new();
    loop {
        let stop = shared.stop.load(Ordering::Relaxed);
        outputs.append(&mut lock(&shared.new));
        outputs.retain_mut(|output| {
            let goes_on = output.write();
            if !goes_on {
                shared.ended.wake();
            }
            goes_on
        });
        if stop {
            return;
        }
        wait(shared, &outputs);
        shared.wake.clear();
    }
}

/// Until somebody has recorded, an output that was full takes more, or a reader has gone.
fn wait(shared: &Shared, outputs: &[Output]) {
    let mut polled = vec![PollFd::new(&*shared.wake, PollFlags::IN)];
    for output in outputs.iter().filter(|output| !output.regular) {
        let blocked = output.written < output.taken.len();
        let wanted = if blocked {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        polled.push(PollFd::new(&output.file, wanted));
    }
    // An error here would come again at once; the pause keeps it from taking a processor.
    if let Err(error) = poll(&mut polled, None)
        && error != Errno::INTR
    {
        thread::sleep(Duration::from_millis(100));
    }
}

impl Output {
    /// Writes what it can; false when this capture is over.
    fn write(&mut self) -> bool {
        self.write_by(|file, bytes| rustix::io::write(file, bytes))
    }

    /// Takes from the queue once: who records as fast as a file takes it leaves others their turn.
    fn write_by(&mut self, mut write: impl FnMut(&File, &[u8]) -> Result<usize, Errno>) -> bool {
        let over = self.sink.over.load(Ordering::Relaxed);
        let mut has_taken = false;
        loop {
            if self.written == self.taken.len() {
                self.taken.clear();
                self.written = 0;
                let mut queue = lock(&self.sink.queue);
                if queue.is_empty() {
                    drop(queue);
                    return !over && self.reader_is_there();
                }
                if std::mem::replace(&mut has_taken, true) {
                    drop(queue);
                    // Who has recorded the rest woke nobody unless the queue was empty.
                    self.sink.wake.wake();
                    return true;
                }
                std::mem::swap(&mut self.taken, &mut queue);
            }
            match write(&self.file, &self.taken[self.written..]) {
                Ok(0) => return self.fail(Errno::IO),
                Ok(written) => self.written += written,
                Err(Errno::INTR) => {}
                // Who has ended it doesn't wait for a reader that doesn't read.
                Err(Errno::AGAIN) => return !over,
                Err(error) => return self.fail(error),
            }
        }
    }

    fn reader_is_there(&mut self) -> bool {
        if self.regular {
            return true;
        }
        let mut polled = [PollFd::new(&self.file, PollFlags::empty())];
        let gone = matches!(poll(&mut polled, Some(&timespec(Duration::ZERO))), Ok(1..));
        !gone || self.fail(Errno::PIPE)
    }

    fn fail(&mut self, error: Errno) -> bool {
        let reason = match error {
            Errno::PIPE | Errno::CONNRESET => "its reader has gone away".to_owned(),
            Errno::NOSPC | Errno::DQUOT => "no space is left where it is written".to_owned(),
            _ => format!("writing it failed: {}", io::Error::from(error)),
        };
        if self.regular {
            self.cut_to_whole_records();
        }
        self.sink.fail(reason);
        false
    }

    /// A file that ends within a record is an error to its readers, so the last piece is taken off.
    fn cut_to_whole_records(&mut self) {
        let Ok(end) = self.file.stream_position() else {
            return;
        };
        let begun = end.saturating_sub(self.written as u64);
        let whole = whole_records(&self.taken[..self.written], begun == 0);
        if whole < self.written {
            let length = begun + whole as u64;
            // It is a kindness to readers; the capture has failed anyhow.
            let _ = ftruncate(self.file.as_fd(), length);
        }
    }
}

/// How many of these bytes are whole records. They begin with one, or at the beginning with the file's header.
#[must_use]
pub fn whole_records(bytes: &[u8], at_beginning: bool) -> usize {
    let mut at = if at_beginning { FILE_HEADER } else { 0 };
    if at > bytes.len() {
        return 0;
    }
    while let Some(kept) = bytes.get(at + 8..at + 12) {
        let kept = u32::from_le_bytes([kept[0], kept[1], kept[2], kept[3]]) as usize;
        let next = at + RECORD_HEADER + kept;
        if next > bytes.len() {
            break;
        }
        at = next;
    }
    at
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Queues hold whole records at any time; a panic elsewhere does them no harm.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_records_as_fast_as_it_is_written_leaves_others_their_turn() {
        let wake = Arc::new(Waker::new().expect("an eventfd"));
        let sink = Arc::new(Sink {
            snap: 0,
            queue: Mutex::new(file_header(0)),
            recorded: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            counters: Arc::default(),
            over: AtomicBool::new(false),
            reason: Mutex::new(None),
            wake: wake.clone(),
        });
        let mut output = Output {
            sink: sink.clone(),
            file: tempfile::tempfile().expect("a file"),
            regular: true,
            taken: Vec::new(),
            written: 0,
        };
        let is_awake = || {
            let mut polled = [PollFd::new(&*wake, PollFlags::IN)];
            let is_awake = poll(&mut polled, Some(&timespec(Duration::ZERO))) == Ok(1);
            wake.clear();
            is_awake
        };
        let mut bytes = 0;
        for round in 0..3 {
            let goes_on = output.write_by(|_, piece| {
                sink.record(&[0; VIRTIO_HEADER], &[]);
                bytes += piece.len();
                Ok(piece.len())
            });
            assert!(goes_on && is_awake(), "round {round}");
        }
        sink.end();
        let mut pieces = 0;
        while output.write_by(|_, piece| {
            pieces += 1;
            bytes += piece.len();
            Ok(piece.len())
        }) {
            assert!(is_awake());
        }
        let record = RECORD_HEADER + MONITOR_HEADER + VIRTIO_HEADER;
        assert_eq!((pieces, bytes), (1, FILE_HEADER + 3 * record));
    }

    #[test]
    fn what_is_cut_off_is_cut_back_to_whole_records() {
        let mut bytes = file_header(100);
        let mut ends = vec![bytes.len()];
        for length in [0, 1, 99] {
            put_record_header(&mut bytes, length, length);
            bytes.resize(bytes.len() + length, 7);
            ends.push(bytes.len());
        }
        for written in 0..=bytes.len() {
            let whole = ends.iter().rfind(|end| **end <= written).copied();
            let cut = whole_records(&bytes[..written], true);
            assert_eq!(cut, whole.unwrap_or(0), "{written}");
        }
        assert_eq!(whole_records(&bytes[FILE_HEADER..][..20], false), 16);
    }
}
