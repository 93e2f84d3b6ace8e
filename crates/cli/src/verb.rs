//! The verbs, one file each.

mod acquire;
mod bench;
mod cleanup;
pub(crate) mod cni;
mod completion;
mod daemon;
mod doctor;
mod exec;
mod forward;
mod health;
mod identity;
mod impair;
mod lab;
mod list;
mod policy;
mod pool;
mod publish;
mod relay;
mod release;
mod run;
mod show;
mod top;
mod trace;
mod vsock;

use clap::Subcommand;

use crate::{Context, failure::Outcome};

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Run the daemon in the foreground: fill pools, hand out slots, listen on the socket.
    Daemon(daemon::Arguments),
    /// Say whether the daemon and its data path work, and what is wrong.
    Health(health::Arguments),
    /// Create, list, show, change and delete pools of slots.
    #[command(subcommand)]
    Pool(pool::Verb),
    /// Take a slot of a pool.
    Acquire(acquire::Arguments),
    /// Give slots back.
    Release(release::Arguments),
    /// List leases.
    List(list::Arguments),
    /// Show a lease with what the kernel says of it now.
    Show(show::Arguments),
    /// Show, set or reset what a lease may reach.
    #[command(subcommand)]
    Policy(policy::Verb),
    /// Show the traffic of leases, live.
    Top(top::Arguments),
    /// Show what becomes of each packet of a lease, live.
    Trace(trace::Arguments),
    /// Let a host port lead to a lease, list or withdraw such ports.
    Publish(publish::Arguments),
    /// Speak with guests by vsock, see and say what they may reach by it.
    #[command(subcommand)]
    Vsock(vsock::Verb),
    /// Give an interface a bad network, live: loss, delay, rate, and more.
    Impair(Box<impair::Arguments>),
    /// Run a command inside a slot's network namespace, and release the slot at its end.
    Run(run::Arguments),
    /// Run a command that gets the lease's TAPs as open descriptors.
    Exec(exec::Arguments),
    /// Forward packets between two interfaces, as bad a network as you like.
    Forward(forward::Arguments),
    /// Make a small network of hosts from a file, run commands in it, take it away.
    #[command(subcommand)]
    Lab(lab::Verb),
    /// Give the sockets of a cgroup addresses of their own in the host's namespace.
    #[command(subcommand)]
    Identity(identity::Verb),
    /// Be the CNI plugin, as container runtimes start it under the name sandwire-cni, or install it.
    Cni(cni::Arguments),
    /// Let chosen traffic leave the host only inside TLS, to a relay that delivers it.
    #[command(subcommand)]
    Relay(relay::Verb),
    /// Measure this machine, in namespaces of its own, and report on measurements.
    Bench(sandwire_bench::command::BenchCommand),
    /// Say what this host can do, and what on it would block sandboxes' traffic.
    Doctor(doctor::Arguments),
    /// Remove what a daemon that is gone has left in the kernel.
    Cleanup(cleanup::Arguments),
    /// Print a completion script for a shell.
    Completion(completion::Arguments),
}

impl Verb {
    /// Does it.
    pub(crate) fn run(self, context: &Context) -> Outcome {
        match self {
            Self::Daemon(arguments) => daemon::run(&arguments),
            Self::Health(arguments) => health::run(context, &arguments),
            Self::Pool(verb) => pool::run(context, verb),
            Self::Acquire(arguments) => acquire::run(context, arguments),
            Self::Release(arguments) => release::run(context, &arguments),
            Self::List(arguments) => list::run(context, &arguments),
            Self::Show(arguments) => show::run(context, &arguments),
            Self::Policy(verb) => policy::run(context, verb),
            Self::Top(arguments) => top::run(context, &arguments),
            Self::Trace(arguments) => trace::run(context, &arguments),
            Self::Publish(arguments) => publish::run(context, &arguments),
            Self::Vsock(verb) => vsock::run(context, verb),
            Self::Impair(arguments) => impair::run(context, *arguments),
            Self::Run(arguments) => run::run(context, &arguments),
            Self::Exec(arguments) => exec::run(context, &arguments),
            Self::Forward(arguments) => forward::run(context, &arguments),
            Self::Lab(verb) => lab::run(context, verb),
            Self::Identity(verb) => identity::run(context, verb),
            Self::Cni(arguments) => cni::run(context, arguments),
            Self::Relay(verb) => relay::run(context, &verb),
            Self::Bench(command) => bench::run(context, &command),
            Self::Doctor(arguments) => doctor::run(context, &arguments),
            Self::Cleanup(arguments) => cleanup::run(context, &arguments),
            Self::Completion(arguments) => completion::run(context, &arguments),
        }
    }
}
