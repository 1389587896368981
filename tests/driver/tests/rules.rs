//! That the stand-in is as strict as it says: each rule broken once.

use cudarc::driver::sys::CUresult::{self, *};
use dreamc_driver::machine::{Mode, Outcome, Shape};
use dreamc_driver::{CUBIN, Machine, Settings};

/// `bump` adds one to each of 32 words; `large` has 1 KiB of static shared memory.
const PTX: &str = "\
.version 8.0
.target sm_80
.address_size 64
.visible .entry bump(.param .u64 at)
.maxntid 64, 1, 1
{
.reg .b32 %r<3>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [at];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
ld.global.u32 %r2, [%rd3];
add.s32 %r2, %r2, 1;
st.global.u32 [%rd3], %r2;
ret;
}
.visible .entry large()
{
.shared .align 4 .b8 fixed[1024];
ret;
}
";

const WARP: Shape = Shape { grid: [1, 1, 1], block: [32, 1, 1], shared: 0 };
const NON_BLOCKING: u32 = 1;

/// A driver with a context, a stream, 128 bytes and a kernel.
struct Ready {
    driver: Machine,
    stream: u64,
    memory: u64,
    module: u64,
    bump: u64,
}

fn machine(settings: &str) -> Machine {
    let mut driver = Machine::new(Settings::parse(settings).unwrap());
    driver.init(0).unwrap();
    driver
}

fn ready(settings: &str) -> Ready {
    let mut driver = machine(settings);
    let context = driver.retain(0).unwrap();
    driver.set_current(context).unwrap();
    let stream = driver.stream(NON_BLOCKING).unwrap();
    let memory = driver.alloc(128).unwrap();
    let module = driver.load(PTX.as_bytes()).unwrap();
    let bump = driver.function(module, "bump").unwrap();
    Ready { driver, stream, memory, module, bump }
}

impl Ready {
    fn zero(&mut self) {
        self.driver.set(self.memory, 0, 128, self.stream).unwrap();
    }

    fn launch(&mut self) -> Outcome<()> {
        self.launch_at(self.memory)
    }

    fn launch_at(&mut self, address: u64) -> Outcome<()> {
        self.driver.launch(self.bump, WARP, self.stream, vec![address.to_le_bytes().to_vec()])
    }

    fn wait(&mut self) -> Outcome<()> {
        self.driver.wait(self.stream)
    }

    /// The first word, properly waited for.
    fn word(&mut self) -> u32 {
        let mut bytes = [0; 4];
        // SAFETY: the copy is waited for while the bytes are there.
        unsafe { self.driver.to_host(bytes.as_mut_ptr(), self.memory, 4, self.stream) }.unwrap();
        self.wait().unwrap();
        u32::from_le_bytes(bytes)
    }

    /// Lets go of everything and gives what was complained about.
    fn complaints(mut self) -> Vec<String> {
        let _ = self.driver.unload(self.module);
        let _ = self.driver.free(self.memory);
        let _ = self.driver.destroy_stream(self.stream);
        let _ = self.driver.release(0);
        complaints(&self.driver)
    }
}

fn complaints(driver: &Machine) -> Vec<String> {
    driver.log().into_iter().filter(|line| line.starts_with("complaint")).collect()
}

/// That there is one complaint, with these words.
fn one(complaints: Vec<String>, words: &str) {
    assert!(complaints.len() == 1 && complaints[0].contains(words), "{complaints:?}");
}

fn fails<T: std::fmt::Debug>(done: Outcome<T>, code: CUresult) {
    assert_eq!(done.unwrap_err(), code);
}

#[test]
fn work_that_follows_the_rules_is_done_without_a_complaint() {
    let mut r = ready("");
    r.zero();
    r.launch().unwrap();
    assert_eq!(r.word(), 1);
    assert_eq!(r.complaints(), Vec::<String>::new());
}

#[test]
fn calls_need_initialisation_and_a_context_of_their_thread() {
    let mut driver = Machine::new(Settings::default());
    fails(driver.count(), CUDA_ERROR_NOT_INITIALIZED);
    driver.init(0).unwrap();
    fails(driver.alloc(4), CUDA_ERROR_INVALID_CONTEXT);
    let context = driver.retain(0).unwrap();
    driver.set_current(context).unwrap();
    driver.info().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| fails(driver.alloc(4), CUDA_ERROR_INVALID_CONTEXT)).join().unwrap();
    });
    driver.release(0).unwrap();
    fails(driver.alloc(4), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    fails(driver.release(0), CUDA_ERROR_INVALID_CONTEXT);
    fails(driver.retain(1), CUDA_ERROR_INVALID_DEVICE);
}

#[test]
fn nothing_is_done_before_something_waits() {
    let mut r = ready("");
    r.zero();
    r.launch().unwrap();
    let mut early = [9; 4];
    // SAFETY: waited for below.
    unsafe { r.driver.to_host(early.as_mut_ptr(), r.memory, 4, r.stream) }.unwrap();
    assert_eq!(early, [9; 4]);
    r.wait().unwrap();
    assert_eq!(early, [1, 0, 0, 0]);
    // Where work is done at once it is done at once.
    let mut r = ready("timing=early");
    r.zero();
    let mut now = [9; 4];
    // SAFETY: done when the call returns.
    unsafe { r.driver.to_host(now.as_mut_ptr(), r.memory, 4, r.stream) }.unwrap();
    assert_eq!(now, [0; 4]);
}

#[test]
fn host_memory_is_read_when_the_copy_is_done() {
    let mut r = ready("");
    let mut host = 1u32.to_le_bytes();
    // SAFETY: waited for while the bytes are there.
    unsafe { r.driver.to_device(r.memory, host.as_ptr(), 4, r.stream) }.unwrap();
    host[0] = 7;
    std::hint::black_box(&mut host);
    assert_eq!(r.word(), 7);
    one(r.complaints(), "host memory changed");
}

#[test]
fn the_legacy_stream_is_ordered_with_blocking_streams_alone() {
    for (flags, expected) in [(NON_BLOCKING, 0), (0, 5)] {
        let mut r = ready("");
        r.stream = r.driver.stream(flags).unwrap();
        r.zero();
        r.wait().unwrap();
        // As a plain `cuMemsetD8` would leave it.
        r.driver.set(r.memory, 5, 1, 0).unwrap();
        assert_eq!(r.word(), expected);
    }
}

#[test]
fn handles_are_used_while_they_are_there() {
    let mut r = ready("");
    fails(r.driver.wait(77 << 4), CUDA_ERROR_INVALID_HANDLE);
    one(r.complaints(), "a stream that never was");
    let mut r = ready("");
    r.driver.free(r.memory).unwrap();
    one(r.complaints(), "no allocation");
    let mut r = ready("");
    r.driver.unload(r.module).unwrap();
    fails(r.launch(), CUDA_ERROR_INVALID_HANDLE);
    assert!(r.complaints()[0].contains("a function that is gone"));
    // What is still under way when its memory or its code goes.
    let mut r = ready("");
    r.zero();
    r.driver.free(r.memory).unwrap();
    fails(r.wait(), CUDA_ERROR_ILLEGAL_ADDRESS);
    let mut r = ready("");
    r.zero();
    r.launch().unwrap();
    r.driver.unload(r.module).unwrap();
    fails(r.wait(), CUDA_ERROR_ILLEGAL_INSTRUCTION);
}

#[test]
fn what_is_left_behind_is_told() {
    let mut driver = ready("").driver;
    driver.release(0).unwrap();
    let left = complaints(&driver);
    for what in ["allocation, 1", "module, 1", "stream, 1"] {
        assert!(left.iter().any(|line| line.contains(what)), "{left:?}");
    }
    let mut r = ready("");
    r.zero();
    r.driver.destroy_stream(r.stream).unwrap();
    assert!(complaints(&r.driver)[0].contains("nobody waited for"));
}

#[test]
fn an_illegal_address_comes_out_later_and_stays() {
    let mut r = ready("cards=2");
    r.launch_at(r.memory + (1 << 30)).unwrap();
    r.driver.info().unwrap();
    fails(r.wait(), CUDA_ERROR_ILLEGAL_ADDRESS);
    fails(r.driver.alloc(4), CUDA_ERROR_ILLEGAL_ADDRESS);
    fails(r.driver.free(r.memory), CUDA_ERROR_ILLEGAL_ADDRESS);
    fails(r.launch(), CUDA_ERROR_ILLEGAL_ADDRESS);
    // The other card goes on.
    let other = r.driver.retain(1).unwrap();
    r.driver.set_current(other).unwrap();
    r.driver.alloc(4).unwrap();
    // So it does where an address is misaligned, or what is read was never written.
    let mut r = ready("");
    r.zero();
    r.launch_at(r.memory + 1).unwrap();
    fails(r.wait(), CUDA_ERROR_MISALIGNED_ADDRESS);
    let mut r = ready("");
    r.launch().unwrap();
    fails(r.wait(), CUDA_ERROR_LAUNCH_FAILED);
    assert!(r.complaints()[0].contains("nothing has written"));
    // Copies are looked at when they are asked for.
    let mut r = ready("");
    fails(r.driver.set(r.memory, 0, 129, r.stream), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn memory_ends() {
    let mut r = ready("memory=6291456");
    assert_eq!(r.driver.info().unwrap(), (4 << 20, 6 << 20));
    fails(r.driver.alloc((4 << 20) + 1), CUDA_ERROR_OUT_OF_MEMORY);
    let rest = r.driver.alloc(3 << 20).unwrap();
    fails(r.driver.alloc(1), CUDA_ERROR_OUT_OF_MEMORY);
    r.driver.free(rest).unwrap();
    fails(r.driver.alloc(0), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(r.driver.info().unwrap().0, 4 << 20);
}

#[test]
fn launches_have_limits() {
    let mut r = ready("");
    let args = || vec![vec![0; 8]];
    let shapes = [
        Shape { grid: [0, 1, 1], ..WARP },
        Shape { grid: [1 << 31, 1, 1], ..WARP },
        Shape { grid: [1, 65536, 1], ..WARP },
        Shape { grid: [1, 1, 65536], ..WARP },
        // The kernel says 64.
        Shape { block: [65, 1, 1], ..WARP },
        Shape { block: [1, 1, 65], ..WARP },
        Shape { shared: 48 * 1024 + 1, ..WARP },
    ];
    for shape in shapes {
        fails(r.driver.launch(r.bump, shape, r.stream, args()), CUDA_ERROR_INVALID_VALUE);
    }
    // Static shared memory counts, and beyond 48 KiB leave is asked for, up to what the card has.
    let large = r.driver.function(r.module, "large").unwrap();
    let most = |card: &Shape| Shape { shared: card.shared, ..WARP };
    let at = |shared: u32| most(&Shape { shared, ..WARP });
    fails(r.driver.launch(large, at(48 * 1024), r.stream, vec![]), CUDA_ERROR_INVALID_VALUE);
    r.driver.launch(large, at(47 * 1024), r.stream, vec![]).unwrap();
    r.driver.allow_shared(large, 8, 162 * 1024).unwrap();
    r.driver.launch(large, at(162 * 1024), r.stream, vec![]).unwrap();
    fails(r.driver.allow_shared(large, 8, 163 * 1024), CUDA_ERROR_INVALID_VALUE);
    let mut r = ready("card=sm_90");
    r.driver.allow_shared(r.bump, 8, 227 * 1024).unwrap();
    fails(r.driver.allow_shared(r.bump, 8, 228 * 1024), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn a_capture_is_replayed_with_arguments_of_then_and_host_memory_of_now() {
    let mut r = ready("");
    r.zero();
    r.launch().unwrap();
    r.wait().unwrap();
    let mut host = 40u32.to_le_bytes();
    r.driver.begin(r.stream, Mode::ThreadLocal).unwrap();
    // SAFETY: there until the last replay was waited for.
    unsafe { r.driver.to_device(r.memory, host.as_ptr(), 4, r.stream) }.unwrap();
    r.launch().unwrap();
    let graph = r.driver.end(r.stream).unwrap();
    assert_eq!(r.word(), 1, "what is captured does not run");
    let executable = r.driver.instantiate(graph, 0).unwrap();
    r.driver.destroy_graph(graph).unwrap();
    r.driver.replay(executable, r.stream).unwrap();
    assert_eq!(r.word(), 41);
    host[0] = 50;
    std::hint::black_box(&mut host);
    r.driver.replay(executable, r.stream).unwrap();
    assert_eq!(r.word(), 51);
    r.driver.destroy_executable(executable).unwrap();
    fails(r.driver.replay(executable, r.stream), CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn what_a_capture_forbids_ends_it() {
    type Break = fn(&mut Ready) -> Outcome<()>;
    let breaks: [(Break, CUresult); 6] = [
        (|r| r.wait(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (|r| r.driver.alloc(4).map(|_| ()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (|r| r.driver.free(r.memory), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (|r| r.driver.load(PTX.as_bytes()).map(|_| ()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (|r| r.driver.unload(r.module), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        // A kernel that never ran, and may have to be loaded.
        (|r| r.launch(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
    ];
    for (forbidden, code) in breaks {
        let mut r = ready("");
        r.driver.begin(r.stream, Mode::ThreadLocal).unwrap();
        fails(forbidden(&mut r), code);
        fails(r.driver.set(r.memory, 0, 4, r.stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        fails(r.driver.end(r.stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // The stream serves again.
        r.zero();
        assert_eq!(r.word(), 0);
        assert_eq!(complaints(&r.driver).len(), 1);
    }
    // Another thread may allocate, but not where the capture is everybody's.
    for (mode, allowed) in [(Mode::ThreadLocal, true), (Mode::Global, false)] {
        let mut r = ready("");
        r.driver.begin(r.stream, mode).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let context = r.driver.retain(0).unwrap();
                r.driver.set_current(context).unwrap();
                assert_eq!(r.driver.alloc(4).is_ok(), allowed);
            });
            other.join().unwrap();
        });
        assert_eq!(r.driver.end(r.stream).is_ok(), allowed);
    }
    let mut r = ready("");
    r.driver.begin(r.stream, Mode::Relaxed).unwrap();
    r.driver.alloc(4).unwrap();
    r.driver.end(r.stream).unwrap();
    // The order of calls, the legacy stream, and the thread that ends it.
    fails(r.driver.end(r.stream), CUDA_ERROR_ILLEGAL_STATE);
    fails(r.driver.begin(0, Mode::Relaxed), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    let blocking = r.driver.stream(0).unwrap();
    r.driver.begin(blocking, Mode::Relaxed).unwrap();
    fails(r.driver.begin(blocking, Mode::Relaxed), CUDA_ERROR_ILLEGAL_STATE);
    fails(r.driver.set(r.memory, 0, 4, 0), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    fails(r.driver.end(blocking), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    r.driver.begin(r.stream, Mode::ThreadLocal).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let context = r.driver.retain(0).unwrap();
            r.driver.set_current(context).unwrap();
            fails(r.driver.end(r.stream), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        });
        other.join().unwrap();
    });
}

#[test]
fn code_is_for_a_card_and_a_driver() {
    let cubin = |architecture: &str| format!("{CUBIN}{architecture}\n{PTX}");
    let load = |settings: &str, image: &str| ready(settings).driver.load(image.as_bytes()).map(|_| ());
    load("", &cubin("sm_80")).unwrap();
    load("card=sm_86", &cubin("sm_80")).unwrap();
    load("card=sm_90", &cubin("sm_90a")).unwrap();
    load("card=sm_90", PTX).unwrap();
    fails(load("card=sm_90", &cubin("sm_80")), CUDA_ERROR_NO_BINARY_FOR_GPU);
    fails(load("", &cubin("sm_90a")), CUDA_ERROR_NO_BINARY_FOR_GPU);
    fails(load("card=sm_100", &cubin("sm_90a")), CUDA_ERROR_NO_BINARY_FOR_GPU);
    fails(load("", &PTX.replace("sm_80", "sm_90")), CUDA_ERROR_INVALID_PTX);
    fails(load("version=12040", &PTX.replace("8.0", "8.7")), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    fails(load("version=12040", &cubin("sm_80").replace("8.0", "9.0")), CUDA_ERROR_INVALID_IMAGE);
    fails(load("", "no code"), CUDA_ERROR_INVALID_IMAGE);
    fails(ready("").driver.function(4 << 4, "bump"), CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn faults_come_when_they_are_asked_for() {
    let mut r = ready("fault=cuMemAlloc:2:2 fault=kernel:2:719 fault=cuMemGetInfo:1:214");
    fails(r.driver.alloc(4), CUDA_ERROR_OUT_OF_MEMORY);
    r.driver.alloc(4).unwrap();
    r.zero();
    for _ in 0..2 {
        r.launch().unwrap();
    }
    fails(r.wait(), CUDA_ERROR_LAUNCH_FAILED);
    fails(r.wait(), CUDA_ERROR_LAUNCH_FAILED);
    let mut r = ready("fault=cuMemGetInfo:1:214");
    fails(r.driver.info(), CUDA_ERROR_ECC_UNCORRECTABLE);
    fails(r.launch(), CUDA_ERROR_ECC_UNCORRECTABLE);
}
