//! Libraries of makers of GPUs, loaded where they are: the first file that loads, and its calls by
//! name.

use libloading::Library;
use std::path::PathBuf;

/// Makes `Calls`, the functions of a library by name, all looked up before any is called. Codes are
/// numbers, as newer libraries may have new ones.
macro_rules! calls {
    ($($name:ident($($type:ty),*) -> $result:ty;)*) => {
        #[allow(non_snake_case, reason = "the library's names")]
        struct Calls { $($name: unsafe extern "C" fn($($type),*) -> $result,)* }

        impl Calls {
            fn of(library: &libloading::Library) -> Result<Calls, libloading::Error> {
                // SAFETY: the types are those of the library's header; it is never unloaded.
                unsafe { Ok(Calls { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* }) }
            }
        }
    };
}
pub(super) use calls;

/// The first of these files that loads, and its name; the words of the loader where none does.
pub(super) fn first(names: &[PathBuf]) -> Result<(Library, String), String> {
    let mut reason = String::new();
    for name in names {
        let at = name.display();
        // SAFETY: loads a shared library whose initialisers are its maker's own.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok((library, at.to_string())),
            Err(error) => reason = format!("{at}: {error}"),
        }
    }
    Err(reason)
}

/// Major, minor and patch of a number of NVIDIA's.
pub(super) fn version(number: usize) -> [usize; 3] {
    [number / 10000, number / 100 % 100, number % 100]
}
