//! A header is whatever 44 bytes say, and says the same when written again.

use sandwire_vsock_host::packet::{HEADER_BYTES, Header, Operation, type_from_number, type_number};

/// One case.
pub(crate) fn run(bytes: &[u8]) {
    let Some(first) = bytes.first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let header = Header::parse(first);
    assert_eq!(header.bytes(), *first);
    if let Some(operation) = Operation::from_number(header.op) {
        assert_eq!(operation as u16, header.op);
    }
    if let Some(kind) = type_from_number(header.kind) {
        assert_eq!(type_number(kind), header.kind);
    }
}
