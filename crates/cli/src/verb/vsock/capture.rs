//! `sandwire vsock capture`: a guest's vsock packets as a file for tcpdump and Wireshark.

use std::{
    io::{self, ErrorKind},
    path::PathBuf,
};

use clap::Args;
use sandwire_api::client::{Capture, Client};
use sandwire_vsock_host::capture::whole_records;

use super::{Which, guest};
use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    interruption::{Ends, end_in_any_case, interrupted},
    output::note,
    record_file::RecordFile,
    render,
};

/// Command line of `sandwire vsock capture`.
#[derive(Debug, Args)]
#[command(
    after_help = "The file has the link type VSOCK (271). Interrupting it ends it in order. With a hybrid guest, \
    whose VMM has the packets, they are made up from what is relayed."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    which: Which,

    /// File to write; `-` is standard output.
    #[arg(long, short, value_name = "FILE")]
    write: PathBuf,

    /// Keep so many bytes of each packet's data; all of them without.
    #[arg(long, value_name = "BYTES")]
    snap: Option<u32>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let Arguments { which, write, snap } = arguments;
    let operation = format!("capture vsock packets of lease {}", which.name);
    let failed = |error: io::Error| {
        let file = write.display();
        Failure::failed(format!("cannot {operation}: {file}: {error}"))
    };
    end_in_any_case(&operation).map_err(failed)?;
    let work = async {
        let mut ends = Ends::new().map_err(failed)?;
        let client = Client::new(&context.socket);
        let before = dropped(&client, which).await;
        let mut capture = tokio::select! {
            capture = client.vsock_capture(&which.name, which.owner_uid, *snap) => {
                capture.map_err(cannot(&operation))?
            }
            () = ends.wait() => return Err(interrupted(&operation)),
        };
        // Only now: a refusal leaves the file as it is.
        let mut file = RecordFile::create(write, whole_records).map_err(failed)?;
        note("capturing; interrupt to end");
        let outcome = tokio::select! {
            outcome = copy(&mut capture, &mut file, &operation) => outcome,
            () = ends.wait() => Ok(None),
        };
        note(&format!("{} written", render::bytes(file.written())));
        if let (Some(before), Some(now)) = (before, dropped(&client, which).await)
            && now > before
        {
            note(&format!(
                "{} packets are missing: they came faster than they were written",
                now - before
            ));
        }
        match outcome? {
            Some(error) => Err(failed(error)),
            None => Ok(()),
        }
    };
    guest::serve(&operation, work)
}

/// Packets that captures of the channel have dropped so far, if that can be known.
async fn dropped(client: &Client, which: &Which) -> Option<u64> {
    let found = client.vsock(&which.name, which.owner_uid).await.ok()?;
    Some(found.traffic?.capture_dropped_packets)
}

/// Copies to the end. Returns why the file can't be written, if so.
async fn copy(
    capture: &mut Capture,
    file: &mut RecordFile,
    operation: &str,
) -> Result<Option<io::Error>, Failure> {
    let broken = |error| {
        let reason =
            "its channel may still be there: the daemon or the service for vsock has ended";
        Failure::failed(format!("cannot {operation} any longer: {reason}: {error}"))
    };
    while let Some(chunk) = capture.next().await.map_err(broken)? {
        match file.add(&chunk) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(None),
            Err(error) => return Ok(Some(error)),
        }
    }
    note("the channel has ended");
    Ok(None)
}
