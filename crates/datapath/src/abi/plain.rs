//! Values as the bytes that maps hold.

/// A struct that is bytes through and through: no padding, and any bytes are a value.
///
/// # Safety
/// Only for `#[repr(C)]` structs without padding, of integers and arrays and structs of such.
pub unsafe trait Plain: Copy + Send + Sync + 'static {
    /// A value of zeros.
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: by the promise of the implementation any bytes are a value.
        unsafe { std::mem::zeroed() }
    }

    /// Its bytes, as they are in a map.
    #[must_use]
    fn bytes(&self) -> &[u8] {
        // SAFETY: by the promise of the implementation there is no padding, and the value outlives the slice.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// Reads a value from the start of `bytes`; `None` if they are too few.
    #[must_use]
    fn read(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..size_of::<Self>())?;
        // SAFETY: there are enough bytes, any bytes are a value, and alignment does not matter here.
        Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}

// SAFETY: integers are bytes through and through.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}
