//! How the mirror is declared: so that each struct and enum can be compared with the header's.

/// A struct of the header as this module declares it.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    pub(crate) size: usize,
    pub(crate) fields: &'static [Field],
}

/// A field of a [`Layout`].
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

macro_rules! structs {
    ($($(#[doc = $text:literal])+ $name:ident = $c_name:literal {
        $($(#[doc = $field_text:literal])+ $field:ident: $type:ty,)+
    })+) => {
        $(
            $(#[doc = $text])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            #[repr(C)]
            pub struct $name {
                $($(#[doc = $field_text])+ pub $field: $type,)+
            }

            // SAFETY: `#[repr(C)]`, of plain fields; that their sizes add up is asserted below.
            unsafe impl Plain for $name {}

            impl Default for $name {
                fn default() -> Self {
                    Self::zeroed()
                }
            }

            const _: () = assert!(
                size_of::<$name>() == 0 $(+ size_of::<$type>())+,
                concat!($c_name, " has padding"),
            );
        )+

        /// All structs of the header.
        #[cfg(test)]
        pub(crate) const STRUCTS: &[Layout] = &[$(Layout {
            name: $c_name,
            size: size_of::<$name>(),
            fields: &[$(Field {
                name: stringify!($field),
                offset: std::mem::offset_of!($name, $field),
                size: size_of::<$type>(),
            },)+],
        },)+];
    };
}

/// Names and numbers of an enum of the header.
#[cfg(test)]
pub(crate) type Numbers = (&'static str, &'static [(&'static str, u32)]);

macro_rules! enums {
    ($($(#[doc = $text:literal])+ $name:ident = $c_name:literal {
        $($(#[doc = $value_text:literal])+ $value:ident = $number:literal $c_value:literal,)+
    })+) => {
        $(
            $(#[doc = $text])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
            #[repr(u32)]
            pub enum $name {
                $($(#[doc = $value_text])+ $value = $number,)+
            }

            impl $name {
                /// Its number in the structs.
                #[must_use]
                pub const fn number(self) -> u32 {
                    self as u32
                }

                /// What has this number, if anything has.
                #[must_use]
                pub const fn from_number(number: u32) -> Option<Self> {
                    match number {
                        $($number => Some(Self::$value),)+
                        _ => None,
                    }
                }
            }
        )+

        /// All enums of the header but the drop reasons, which `sandwire_api` has.
        #[cfg(test)]
        pub(crate) const ENUMS: &[Numbers] = &[$(($c_name, &[$(($c_value, $number),)+]),)+];
    };
}
