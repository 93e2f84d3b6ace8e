//! Talks to the daemon over its Unix socket. (written by the daemon part)
