//! A minimal HTTP/1.1 client over any stream: TCP into a clone, or a Unix socket.
//!
//! One request per connection, whole bodies, no redirects. Enough to be independent of the product's own
//! client.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// What a server answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Body as text.
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Errors
    /// If it isn't JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body)
            .with_context(|| format!("not JSON (status {}): {}", self.status, self.body))
    }
}

/// A request to port `port` of an address.
///
/// # Errors
/// If there is no connection or no whole answer within `patience`, for each step.
pub fn request(
    address: IpAddr,
    port: u16,
    method: &str,
    path: &str,
    body: Option<&str>,
    patience: Duration,
) -> Result<Answer> {
    let target = SocketAddr::new(address, port);
    let stream = TcpStream::connect_timeout(&target, patience)
        .with_context(|| format!("connect to {target}"))?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    exchange(stream, method, path, body).with_context(|| format!("{method} {path} of {target}"))
}

/// A request over a Unix socket.
///
/// # Errors
/// If there is no connection or no whole answer within `patience`, for each step.
pub fn request_unix(
    socket: &Path,
    method: &str,
    path: &str,
    body: Option<&str>,
    patience: Duration,
) -> Result<Answer> {
    let name = socket.display();
    let stream = UnixStream::connect(socket).with_context(|| format!("connect to {name}"))?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    exchange(stream, method, path, body).with_context(|| format!("{method} {path} of {name}"))
}

fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: Option<&str>,
) -> Result<Answer> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    if let Some(body) = body {
        text += &format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
    }
    text += "\r\n";
    text += body.unwrap_or_default();
    stream.write_all(text.as_bytes()).context("send")?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 16 * 1024];
    // Not every server closes the connection when asked to, so the answer's own length ends it.
    loop {
        if let Some(answer) = parse(&bytes, false)? {
            return Ok(answer);
        }
        let count = stream.read(&mut chunk).context("receive")?;
        if count == 0 {
            return parse(&bytes, true)?.context("the answer ends too early");
        }
        bytes.extend_from_slice(&chunk[..count]);
    }
}

/// The answer in these bytes, or None if they don't hold a whole one yet.
fn parse(bytes: &[u8], closed: bool) -> Result<Option<Answer>> {
    let Some(head_length) = find(bytes, b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = std::str::from_utf8(&bytes[..head_length]).context("the head isn't text")?;
    let status_line = head.lines().next().unwrap_or_default();
    let status = status_line.split(' ').nth(1).unwrap_or_default();
    let status: u16 = status
        .parse()
        .with_context(|| format!("not HTTP: '{status_line}'"))?;
    let header = |name: &str| {
        head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    };
    let rest = &bytes[head_length + 4..];
    let body = if header("transfer-encoding").is_some_and(|value| value.contains("chunked")) {
        chunked(rest)?
    } else if let Some(length) = header("content-length") {
        let length: usize = length.parse().context("read Content-Length")?;
        rest.get(..length).map(<[u8]>::to_vec)
    } else if status == 204 || status == 304 {
        Some(Vec::new())
    } else {
        closed.then(|| rest.to_vec())
    };
    Ok(body.map(|body| Answer {
        status,
        body: String::from_utf8_lossy(&body).into_owned(),
    }))
}

fn chunked(mut rest: &[u8]) -> Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    loop {
        let Some(end) = find(rest, b"\r\n") else {
            return Ok(None);
        };
        let length = std::str::from_utf8(&rest[..end]).context("read a chunk's length")?;
        let length = usize::from_str_radix(length.trim(), 16).context("read a chunk's length")?;
        let start = end + 2;
        let Some(chunk) = rest.get(start..start + length) else {
            return Ok(None);
        };
        if length == 0 {
            return Ok(Some(body));
        }
        body.extend_from_slice(chunk);
        let Some(next) = rest.get(start + length + 2..) else {
            return Ok(None);
        };
        rest = next;
    }
}

fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes
        .windows(pattern.len())
        .position(|window| window == pattern)
}

/// Fails unless the status is 2xx.
///
/// # Errors
/// With the answer's body.
pub fn successful(answer: Answer) -> Result<Answer> {
    ensure!(
        (200..300).contains(&answer.status),
        "status {}: {}",
        answer.status,
        answer.body.trim()
    );
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_whole_only_with_its_last_byte() {
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ntext";
        assert_eq!(parse(&text[..text.len() - 1], false).unwrap(), None);
        assert_eq!(parse(text, false).unwrap().unwrap().body, "text");
    }

    #[test]
    fn chunks_are_joined() {
        let text = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
        assert_eq!(parse(text, false).unwrap().unwrap().body, "abcde");
    }

    #[test]
    fn an_answer_without_length_ends_with_the_connection() {
        let text = b"HTTP/1.0 404 Not Found\r\n\r\ngone";
        assert_eq!(parse(text, false).unwrap(), None);
        let answer = parse(text, true).unwrap().unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (404, "gone"));
    }
}
