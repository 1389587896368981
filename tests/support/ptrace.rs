//! Kills a program just before a change it would make to a disk.
//!
//! The program runs under `ptrace`: it stops at each system call, those that change files are
//! counted, and at the one asked for it is killed, as `kill -9` does. So each state that a killed
//! process can leave can be made, and made again.

#![cfg(target_os = "linux")]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The end of a traced program.
#[derive(Debug)]
pub enum End {
    /// It was killed.
    Killed,
    /// It ended before.
    Ended {
        /// Changes it made.
        changes: usize,
        /// Whether its exit code was 0.
        success: bool,
    },
}

/// Runs a command until change number `last` (from 1), and kills it there.
pub fn trace(mut command: Command, last: usize) -> io::Result<End> {
    // SAFETY: the call between fork and exec is a system call and nothing else.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut child = command.spawn()?;
    let main = child.id() as libc::pid_t;
    let (mut changes, mut begun) = (0, false);
    loop {
        let mut status = 0;
        // SAFETY: `status` lives through the call. Only this thread's children are waited for, so
        // tests running at the same time are left alone.
        let id = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
        if id == -1 {
            return Err(io::Error::last_os_error());
        }
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            if id == main {
                let success = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
                return Ok(End::Ended { changes, success });
            }
            continue;
        }
        let mut signal = libc::WSTOPSIG(status);
        if !begun {
            begun = true;
            signal = 0;
            let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
            request(libc::PTRACE_SETOPTIONS, id, options as usize)?;
        } else if signal == libc::SIGTRAP | 0x80 {
            signal = 0;
            if changes_a_file(id)? {
                changes += 1;
                if changes == last {
                    child.kill()?;
                    reap(main);
                    return Ok(End::Killed);
                }
            }
        } else if signal == libc::SIGTRAP || (signal == libc::SIGSTOP && id != main) {
            // A new thread, or its first stop.
            signal = 0;
        }
        // A thread may have ended with another's end meanwhile.
        let _ = request(libc::PTRACE_SYSCALL, id, signal as usize);
    }
}

fn request(what: libc::c_uint, id: libc::pid_t, data: usize) -> io::Result<()> {
    // SAFETY: none of the requests made here reads or writes memory of this process.
    match unsafe { libc::ptrace(what, id, 0, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Waits for all threads of a killed process.
fn reap(main: libc::pid_t) {
    let mut status = 0;
    // SAFETY: as above.
    while unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) } > 0 {
        // SAFETY: a process that was killed and not yet waited for keeps its number.
        if unsafe { libc::kill(main, 0) } == -1 {
            break;
        }
    }
}

/// Whether the thread stands before a system call that changes files.
fn changes_a_file(id: libc::pid_t) -> io::Result<bool> {
    // SAFETY: zeros are a value of all its fields.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of_val(&info);
    // SAFETY: the structure lives through the call and is as large as it is said to be.
    let got = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, id, size, &mut info) };
    if got == -1 {
        return Err(io::Error::last_os_error());
    }
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(false);
    }
    // SAFETY: the operation says that this is the part which was filled in.
    let entry = unsafe { info.u.entry };
    let flags = |argument: usize| entry.args[argument] as libc::c_int;
    Ok(match entry.nr as libc::c_long {
        libc::SYS_openat => flags(2) & (libc::O_CREAT | libc::O_TRUNC) != 0,
        libc::SYS_write | libc::SYS_writev => flags(0) > 2,
        libc::SYS_pwrite64 | libc::SYS_ftruncate | libc::SYS_renameat | libc::SYS_renameat2 => true,
        libc::SYS_unlinkat | libc::SYS_mkdirat | libc::SYS_linkat | libc::SYS_copy_file_range => true,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rename | libc::SYS_unlink | libc::SYS_rmdir | libc::SYS_mkdir | libc::SYS_creat => true,
        _ => false,
    })
}
