//! The C library declares its constants as `int`; netlink's fields are narrower. Constants that don't
//! fit are found when this crate is compiled or first used, not sent.

/// A constant that fits 16 bits.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the range is asserted first"
)]
pub(crate) const fn narrow(value: i32) -> u16 {
    assert!(value >= 0 && value <= u16::MAX as i32);
    value as u16
}

/// A constant that fits one byte.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the range is asserted first"
)]
pub(crate) const fn octet(value: i32) -> u8 {
    assert!(value >= 0 && value <= u8::MAX as i32);
    value as u8
}
