//! `sandwire pool set`: changes a pool while it is used.

use std::path::PathBuf;

use clap::Args;
use sandwire_api::{name::Name, pool::ChangePool, slot::DataPath};

use super::{pool_text, wait_until_full};
use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    verb::policy::{
        self, PolicyFlags,
        flags::{self, words},
    },
};

/// Command line of `sandwire pool set`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Name of the pool.
    name: Name,

    /// Slots to keep ready, beside those that are leased.
    #[arg(long)]
    size: Option<u32>,

    /// Move all slots to this data path, leased ones too; connections go on. For netns slots.
    #[arg(long, value_parser = words::<DataPath>(&["nft", "ebpf"]))]
    data_path: Option<DataPath>,

    /// Seconds that a clone address rests that is released from now on.
    #[arg(long, value_name = "SECONDS")]
    quarantine: Option<u32>,

    /// Wait until the pool is full.
    #[arg(long)]
    wait: bool,

    /// Take the whole policy from this file, TOML or JSON; `-` reads standard input.
    #[arg(long, value_name = "FILE", conflicts_with = flags::GROUP)]
    policy: Option<PathBuf>,

    /// Take what guests may reach by vsock from this file, TOML or JSON; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    vsock_policy: Option<PathBuf>,

    #[command(flatten)]
    flags: PolicyFlags,
}

pub(super) fn run(context: &Context, arguments: Arguments) -> Outcome {
    let name = arguments.name;
    let operation = format!("change pool {name}");
    let client = super::patient(context);
    let policy = match &arguments.policy {
        Some(file) => Some(policy::read_policy(file, &operation)?),
        None if arguments.flags.is_empty() => None,
        None => {
            let pool = client.pool(&name).map_err(cannot(&operation))?;
            Some(arguments.flags.apply(pool.spec.policy))
        }
    };
    let vsock = match &arguments.vsock_policy {
        Some(file) => Some(policy::read_policy(file, &operation)?),
        None => None,
    };
    let change = ChangePool {
        size: arguments.size,
        policy,
        data_path: arguments.data_path,
        vsock,
        access: None,
        quarantine_seconds: arguments.quarantine,
    };
    if change == ChangePool::default() {
        return Err(Failure::refused(format!(
            "cannot {operation}: nothing to change is given; see --help"
        )));
    }
    let mut pool = client
        .change_pool(&name, &change)
        .map_err(cannot(&operation))?;
    if arguments.wait {
        pool = wait_until_full(&client, pool)?;
    }
    context.output.answer(&pool, pool_text)
}
