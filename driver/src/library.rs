//! Calls of NVIDIA's libraries: functions of C that answer with a code, 0 where all went well.

use crate::Machine;
use cudarc::driver::sys::CUresult;

/// The result of a call that fails: a code of its library.
pub type Status<T> = Result<T, u32>;

/// Runs a call; `broken` is the code of one that panics.
pub(crate) fn call(broken: u32, what: impl FnOnce(&mut Machine) -> Status<()>) -> u32 {
    let mut status = 0;
    let done = crate::api::call(|machine| {
        status = what(machine).err().unwrap_or(0);
        Ok(())
    });
    if done == CUresult::CUDA_SUCCESS { status } else { broken }
}

/// Writes a result; `invalid` is the code where there is no place for it.
pub(crate) fn give<T>(invalid: u32, to: *mut T, value: Status<T>) -> Status<()> {
    let value = value?;
    crate::api::put(to, Ok(value)).map_err(|_| invalid)
}

/// Calls as the library's header declares them, after the code that a panicking call returns.
macro_rules! calls {
    ($broken:ident; $($name:ident($($argument:ident: $type:ty),*) => $body:expr;)*) => {$(
        /// As NVIDIA documents it.
        ///
        /// # Safety
        /// As NVIDIA documents it: pointers are to what is said there.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the library's")]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            let body: fn(&mut Machine, $($type),*) -> Status<()> = $body;
            $crate::library::call($broken, |machine| body(machine, $($argument),*))
        }
    )*};
}
pub(crate) use calls;
