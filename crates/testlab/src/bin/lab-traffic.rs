//! What guests run to send and receive: the other end is a test outside, which knows the same streams.

#![expect(clippy::print_stdout, reason = "what it prints is its result")]

use std::{net::SocketAddr, process::ExitCode};

use anyhow::{Context, Result, bail};
use sandwire_testlab::{
    host::serve_udp,
    traffic::{Receiver, exchange_datagram, send},
};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<()> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["send", target, blocks] => println!("{}", send(address(target)?, blocks.parse()?)?),
        ["receive", port] => println!("{}", Receiver::listen(port.parse()?)?.receive()?),
        ["datagram", target, length] => {
            exchange_datagram(address(target)?, length.parse()?)?;
            println!("echoed");
        }
        ["echo", port] => {
            serve_udp(port.parse()?, |packet, _| packet.to_vec())?;
            loop {
                std::thread::park();
            }
        }
        _ => bail!(
            "usage: lab-traffic send TARGET BLOCKS | receive PORT | datagram TARGET BYTES | echo PORT"
        ),
    }
    Ok(())
}

fn address(text: &str) -> Result<SocketAddr> {
    text.parse()
        .with_context(|| format!("'{text}' is no ADDRESS:PORT"))
}
