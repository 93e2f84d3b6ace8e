//! What guests run to speak vsock: told what to do on a serial line, one command a line, and answering there.
//!
//! A command is a number, a verb and its arguments; the answer is the number, `ok` or `error`, and a text.
//! Commands run at the same time, so answers come in any order. Ports are served from the start: from [`ECHO`] to
//! [`COMMANDS`], where a connection takes a command too, for guests that have no second serial line.

use std::{
    fs::File,
    io::{BufRead, BufReader, IoSliceMut, Read, Write},
    net::Shutdown,
    process::ExitCode,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, recvmsg},
    process::{Resource, Rlimit, setrlimit},
    termios::{OptionalActions, tcgetattr, tcsetattr},
};
use sandwire_testlab::traffic::{BLOCK, receive_on, send_on};
use socket2::{Domain, SockAddr, Socket, Type};

/// Streams that come here go back as they came.
const ECHO: u32 = 7;
/// Messages that come here go back as they came, with their end-of-record marks. Streams and messages can't
/// have the same port in Linux.
const ECHO_MESSAGES: u32 = 8;
/// A stream of blocks that comes here is answered, after its end, by its length and hash.
const HASH: u32 = 9;
/// A stream of as many blocks as a line asks for comes from here.
const SOURCE: u32 = 10;
/// A verb and its arguments in a line that come here are answered in a line: `ok` or `error`, and a text.
const COMMANDS: u32 = 11;

const ANY_CID: u32 = u32::MAX;
const PATIENCE: Duration = Duration::from_secs(60);
const DESCRIPTORS: u64 = 4096;

fn main() -> ExitCode {
    let line = std::env::args().nth(1);
    match line
        .context("usage: lab-vsock TTY")
        .and_then(|path| run(&path))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(path: &str) -> Result<()> {
    let limit = Rlimit {
        current: Some(DESCRIPTORS),
        maximum: Some(DESCRIPTORS),
    };
    setrlimit(Resource::Nofile, limit).context("raise the limit of descriptors")?;
    let tty = File::options().read(true).write(true).open(path);
    let tty = tty.with_context(|| format!("open {path}"))?;
    let mut settings = tcgetattr(&tty).context("read the line's settings")?;
    settings.make_raw();
    tcsetattr(&tty, OptionalActions::Now, &settings).context("make the line raw")?;

    serve(Type::STREAM, ECHO, echo_bytes)?;
    serve(Type::STREAM, HASH, answer_hash)?;
    serve(Type::STREAM, SOURCE, send_as_asked)?;
    serve(Type::STREAM, COMMANDS, obey_one)?;
    serve(Type::SEQPACKET, ECHO_MESSAGES, echo_messages)?;

    let answers = Arc::new(Mutex::new(tty.try_clone()?));
    say(&answers, "0 ok ready");
    for line in BufReader::new(tty).lines() {
        let line = line.context("read a command")?;
        let answers = answers.clone();
        thread::spawn(move || {
            let (number, command) = line.split_once(' ').unwrap_or((&line, ""));
            say(&answers, &format!("{number} {}", answer(command)));
        });
    }
    bail!("the serial line ended")
}

fn say(line: &Mutex<File>, text: &str) {
    let mut line = line
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Err(error) = writeln!(line, "{text}") {
        eprintln!("error: answer '{text}': {error}");
    }
}

/// What a command comes to, in a line.
fn answer(command: &str) -> String {
    let answer = match obey(command) {
        Ok(text) => format!("ok {text}"),
        Err(error) => format!("error {error:#}"),
    };
    answer.replace('\n', "; ")
}

fn obey(command: &str) -> Result<String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    match words[..] {
        ["send", cid, port, blocks] => send(connect(Type::STREAM, cid, port)?, blocks.parse()?),
        ["try", "stream", cid, port] => connect(Type::STREAM, cid, port).map(|_| String::new()),
        ["try", "seqpacket", cid, port] => {
            connect(Type::SEQPACKET, cid, port).map(|_| String::new())
        }
        ["hold", cid, port] => hold(connect(Type::STREAM, cid, port)?),
        ["greet", cid, port, text] => greet(connect(Type::STREAM, cid, port)?, text),
        ["crowd", cid, port, count] => crowd(cid, port, count.parse()?),
        ["messages", cid, port, ref lengths @ ..] => {
            messages(&connect(Type::SEQPACKET, cid, port)?, lengths)
        }
        _ => bail!("no such command: {command}"),
    }
}

fn connect(kind: Type, cid: &str, port: &str) -> Result<Socket> {
    let address = SockAddr::vsock(cid.parse()?, port.parse()?);
    let socket = Socket::new(Domain::VSOCK, kind, None).context("make a socket")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket
        .connect(&address)
        .with_context(|| format!("connect to {cid}:{port}"))?;
    Ok(socket)
}

/// Sends blocks, closes its half, and returns what it sent, how long that took until the answer's end, and
/// the answer.
fn send(mut socket: Socket, blocks: u64) -> Result<String> {
    let started = Instant::now();
    let sent = send_on(&mut socket, blocks)?;
    socket.shutdown(Shutdown::Write).context("close one half")?;
    let mut answer = String::new();
    socket
        .read_to_string(&mut answer)
        .context("read the answer")?;
    let took = started.elapsed().as_millis();
    Ok(format!("{sent} | {} | {took} ms", answer.trim()))
}

/// Waits until the connection ends, and says how.
fn hold(mut socket: Socket) -> Result<String> {
    socket.set_read_timeout(None)?;
    match socket.read(&mut [0; 64]) {
        Ok(0) => Ok("end".to_owned()),
        Ok(count) => Ok(format!("{count} bytes")),
        Err(error) => Ok(format!("{error}")),
    }
}

/// Sends a word in a line and returns the line that comes back.
fn greet(mut socket: Socket, text: &str) -> Result<String> {
    socket.write_all(format!("{text}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(socket).read_line(&mut answer)?;
    Ok(answer.trim_end().to_owned())
}

/// Opens so many connections, and only then exchanges a number on each.
fn crowd(cid: &str, port: &str, count: u64) -> Result<String> {
    let mut sockets = Vec::new();
    for number in 0..count {
        let socket = connect(Type::STREAM, cid, port);
        sockets.push(socket.with_context(|| format!("connection {number}"))?);
    }
    for (number, socket) in (0_u64..).zip(&mut sockets) {
        socket.write_all(&number.to_le_bytes())?;
    }
    for (number, socket) in (0_u64..).zip(&mut sockets) {
        let mut back = [0; 8];
        let read = socket.read_exact(&mut back);
        read.with_context(|| format!("answer on connection {number}"))?;
        ensure!(
            back == number.to_le_bytes(),
            "connection {number} got {back:?}"
        );
    }
    Ok(format!("{count}"))
}

/// Sends messages of these lengths, every second one marked as the end of a record, to an echo server.
/// Returns lengths and marks of what comes back.
fn messages(socket: &Socket, lengths: &[&str]) -> Result<String> {
    let mut seen = Vec::new();
    for (index, length) in lengths.iter().enumerate() {
        let message: Vec<u8> = (0..=250).cycle().take(length.parse()?).collect();
        let flags = if index % 2 == 1 { MSG_EOR } else { 0 };
        let sent = socket.send_with_flags(&message, flags);
        let sent = sent.with_context(|| format!("send a message of {length} bytes"))?;
        ensure!(sent == message.len(), "{sent} of {length} bytes were sent");
        let (back, record) = receive_message(socket)?;
        ensure!(
            back == message,
            "{length} bytes came back as {} others",
            back.len()
        );
        seen.push(format!("{length}{}", if record { "!" } else { "" }));
    }
    Ok(seen.join(" "))
}

/// The next message, and whether it ends a record.
fn receive_message(socket: &Socket) -> Result<(Vec<u8>, bool)> {
    let mut message = vec![0; MESSAGE_MAX];
    let mut slices = [IoSliceMut::new(&mut message)];
    let mut space = RecvAncillaryBuffer::default();
    let received = recvmsg(socket, &mut slices, &mut space, RecvFlags::empty())
        .context("receive a message")?;
    message.truncate(received.bytes);
    Ok((message, received.flags.contains(ReturnFlags::EOR)))
}

fn serve(kind: Type, port: u32, answer: fn(Socket) -> Result<()>) -> Result<()> {
    let socket = Socket::new(Domain::VSOCK, kind, None).context("make a listener")?;
    socket
        .bind(&SockAddr::vsock(ANY_CID, port))
        .with_context(|| format!("take port {port}"))?;
    socket
        .listen(1024)
        .with_context(|| format!("listen on port {port}"))?;
    thread::spawn(move || {
        loop {
            match socket.accept() {
                Ok((connection, _)) => {
                    thread::spawn(move || {
                        if let Err(error) = answer(connection) {
                            eprintln!("port {port}: {error:#}");
                        }
                    });
                }
                Err(error) => eprintln!("accept on port {port}: {error}"),
            }
        }
    });
    Ok(())
}

fn echo_bytes(mut socket: Socket) -> Result<()> {
    let mut buffer = vec![0; BLOCK];
    loop {
        let count = socket.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        socket.write_all(&buffer[..count])?;
    }
}

fn answer_hash(mut socket: Socket) -> Result<()> {
    let received = receive_on(&mut socket)?;
    writeln!(socket, "{received}")?;
    Ok(())
}

fn send_as_asked(socket: Socket) -> Result<()> {
    let mut reader = BufReader::new(socket);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    send_on(reader.get_mut(), line.trim().parse()?)?;
    Ok(())
}

fn obey_one(socket: Socket) -> Result<()> {
    let mut reader = BufReader::new(socket);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    writeln!(reader.get_mut(), "{}", answer(&line))?;
    Ok(())
}

fn echo_messages(socket: Socket) -> Result<()> {
    loop {
        let (message, record) = receive_message(&socket)?;
        if message.is_empty() {
            return Ok(());
        }
        let flags = if record { MSG_EOR } else { 0 };
        socket.send_with_flags(&message, flags)?;
    }
}

/// Longer than any message of a test.
const MESSAGE_MAX: usize = 512 * 1024;
/// As in `linux/socket.h`: the message ends a record.
const MSG_EOR: i32 = 0x80;
