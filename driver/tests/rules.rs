//! That the stand-in is as strict as it says: each rule broken once.

use cudarc::driver::sys::CUresult::{self, *};
use dreamc_driver::cublaslt::{
    EXECUTION_FAILED, INVALID_VALUE, Layout, Matrices, NOT_INITIALIZED, NOT_SUPPORTED,
};
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
    // Work still under way when its memory or its code goes.
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

/// cuBLASLt on a ready card: a 4 x 3 matrix times a 3 x 2 one, of f32, and where they are.
struct Products {
    r: Ready,
    at: u64,
    handle: u64,
    description: u64,
    preference: u64,
    matrices: Matrices,
}

fn f32s(rows: u64, columns: u64, far: i64) -> Layout {
    Layout { dtype: 0, rows, columns, far }
}

fn products(settings: &str) -> Products {
    let mut r = ready(settings);
    let m = &mut r.driver;
    let at = m.alloc(4096).unwrap();
    m.set(at, 0, 4096, r.stream).unwrap();
    let handle = m.create_library().unwrap();
    let description = m.description(69, 0).unwrap();
    let preference = m.preference().unwrap();
    m.set_preference(preference, 1, &1024u64.to_ne_bytes()).unwrap();
    let [a, b, c] = [f32s(4, 3, 4), f32s(3, 2, 3), f32s(4, 2, 4)].map(|layout| m.layout(layout).unwrap());
    Products { r, at, handle, description, preference, matrices: Matrices { handles: [a, b, c, c] } }
}

impl Products {
    fn algorithm(&mut self) -> [u64; 8] {
        self.r
            .driver
            .heuristic(self.handle, self.description, self.matrices, self.preference)
            .unwrap()
            .unwrap()
            .0
    }

    fn write(&mut self, at: u64, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        // SAFETY: waited for while the bytes are there.
        unsafe { self.r.driver.to_device(at, bytes.as_ptr(), bytes.len(), self.r.stream) }.unwrap();
        self.r.wait().unwrap();
    }

    fn read(&mut self, at: u64, count: usize) -> Vec<f32> {
        let mut bytes = vec![0; 4 * count];
        // SAFETY: likewise.
        unsafe { self.r.driver.to_host(bytes.as_mut_ptr(), at, bytes.len(), self.r.stream) }.unwrap();
        self.r.wait().unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// `[a, b, c]` a KiB apart, then the workspace.
    fn multiply(&mut self, beta: f32, algorithm: [u64; 8], workspace: (u64, u64)) -> Result<(), u32> {
        let addresses = [0, 1024, 2048, 2048].map(|offset| self.at + offset);
        let (handle, description, stream) = (self.handle, self.description, self.r.stream);
        self.r.driver.matmul(
            handle,
            description,
            (1.0, beta),
            addresses,
            self.matrices,
            algorithm,
            workspace,
            stream,
        )
    }

    fn complaints(mut self) -> Vec<String> {
        self.r.wait().unwrap();
        let [a, b, c, _] = self.matrices.handles;
        for handle in [a, b, c, self.description, self.preference] {
            self.r.driver.forget(handle).unwrap();
        }
        self.r.driver.destroy_library(self.handle).unwrap();
        self.r.driver.free(self.at).unwrap();
        self.r.complaints()
    }
}

#[test]
fn products_are_columns_times_columns_and_done_late() {
    let mut p = products("");
    let (at, all) = (p.at, (p.at + 3072, 1024));
    p.write(at, &(1..=12).map(|x| x as f32).collect::<Vec<_>>());
    p.write(at + 1024, &[1.0, 0.0, 0.0, 0.0, 2.0, 1.0]);
    p.write(at + 2048, &[0.5; 8]);
    let algorithm = p.algorithm();
    p.multiply(1.0, algorithm, all).unwrap();
    let c = p.read(at + 2048, 8);
    assert_eq!(c, [1.5, 2.5, 3.5, 4.5, 19.5, 22.5, 25.5, 28.5]);
    // Its workspace is overwritten.
    assert!(p.read(at + 3072, 8).iter().all(|x| x.is_nan()));
    // Transposed, and captured like launches.
    let m = &mut p.r.driver;
    let [a, _, c, _] = p.matrices.handles;
    m.set_description(p.description, 3, &1i32.to_ne_bytes()).unwrap();
    let (new, b) = (m.layout(f32s(3, 4, 3)).unwrap(), p.matrices.handles[1]);
    m.forget(a).unwrap();
    p.matrices.handles = [new, b, c, c];
    let algorithm = p.algorithm();
    p.multiply(0.0, algorithm, all).unwrap();
    assert_eq!(p.read(at + 2048, 8), [1.0, 4.0, 7.0, 10.0, 7.0, 16.0, 25.0, 34.0]);
    p.write(at + 2048, &[0.0; 8]);
    p.r.driver.begin(p.r.stream, Mode::ThreadLocal).unwrap();
    p.multiply(1.0, algorithm, all).unwrap();
    let graph = p.r.driver.end(p.r.stream).unwrap();
    assert_eq!(p.read(at + 2048, 1), [0.0]);
    let executable = p.r.driver.instantiate(graph, 0).unwrap();
    for _ in 0..2 {
        p.r.driver.replay(executable, p.r.stream).unwrap();
    }
    assert_eq!(p.read(at + 2048, 2), [2.0, 8.0]);
    p.r.driver.destroy_graph(graph).unwrap();
    p.r.driver.destroy_executable(executable).unwrap();
    assert_eq!(p.complaints(), Vec::<String>::new());
}

#[test]
fn products_have_rules_of_their_own() {
    let broken = |what: &dyn Fn(&mut Products), words: &str| {
        let mut p = products("");
        what(&mut p);
        one(p.complaints(), words);
    };
    let all = |p: &Products| (p.at + 3072, 1024);
    broken(
        &|p| {
            let algorithm = p.algorithm();
            p.r.driver.set_description(p.description, 3, &1i32.to_ne_bytes()).unwrap();
            let other = p.r.driver.layout(f32s(3, 4, 3)).unwrap();
            let own = std::mem::replace(&mut p.matrices.handles[0], other);
            assert_eq!(p.multiply(0.0, algorithm, all(p)), Err(INVALID_VALUE));
            p.r.driver.forget(other).unwrap();
            p.matrices.handles[0] = own;
        },
        "an algorithm of another problem",
    );
    broken(
        &|p| {
            let algorithm = p.algorithm();
            assert_eq!(p.multiply(0.0, algorithm, (p.at + 3072, 16)), Err(INVALID_VALUE));
        },
        "16 bytes of workspace",
    );
    broken(
        &|p| {
            let algorithm = p.algorithm();
            assert_eq!(p.multiply(0.0, algorithm, (p.at + 3080, 512)), Err(INVALID_VALUE));
        },
        "bytes of workspace at",
    );
    broken(
        &|p| {
            let algorithm = p.algorithm();
            p.at += 16;
            assert_eq!(p.multiply(0.0, algorithm, (p.at + 3056, 1024)), Err(NOT_SUPPORTED));
            p.at -= 16;
        },
        "256 bytes were promised",
    );
    broken(
        &|p| {
            let algorithm = p.algorithm();
            p.r.driver.begin(p.r.stream, Mode::ThreadLocal).unwrap();
            assert_eq!(p.multiply(0.0, algorithm, all(p)), Err(EXECUTION_FAILED));
            fails(p.r.driver.end(p.r.stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        },
        "for the first time inside a capture",
    );
    broken(
        &|p| {
            let (context, handle) = (p.r.driver.create_library().unwrap(), p.handle);
            p.r.driver.destroy_library(context).unwrap();
            p.handle = context;
            let found = p.r.driver.heuristic(context, p.description, p.matrices, p.preference);
            assert_eq!(found, Err(NOT_INITIALIZED));
            p.handle = handle;
        },
        "not of this context, or gone",
    );
    // A leading dimension that is too small is found when the product is asked for, and matrices
    // that do not fit.
    for layout in [f32s(4, 3, 3), f32s(4, 5, 4)] {
        broken(
            &|p| {
                let right = std::mem::replace(&mut p.matrices.handles[0], p.r.driver.layout(layout).unwrap());
                let found = p.r.driver.heuristic(p.handle, p.description, p.matrices, p.preference);
                assert_eq!(found, Err(INVALID_VALUE));
                p.r.driver.forget(right).unwrap();
            },
            "matrices that do not fit",
        );
    }
    // Types that it has no kernels for are no mistake.
    let mut p = products("");
    let mixed = p.r.driver.layout(Layout { dtype: 14, ..f32s(4, 2, 4) }).unwrap();
    let right = p.matrices.handles[2];
    p.matrices.handles[2..].fill(mixed);
    let found = p.r.driver.heuristic(p.handle, p.description, p.matrices, p.preference);
    assert_eq!(found, Err(NOT_SUPPORTED));
    assert_eq!(p.r.driver.set_preference(p.preference, 1, &[0; 4]), Err(INVALID_VALUE));
    p.r.driver.forget(right).unwrap();
    assert_eq!(p.complaints(), Vec::<String>::new());
    // Leaks are written down, and ordered faults take place.
    let mut p = products("fault=cublasLtMatmul:1:13");
    let algorithm = p.algorithm();
    assert_eq!(p.multiply(0.0, algorithm, all(&p)), Err(EXECUTION_FAILED));
    p.r.wait().unwrap();
    p.r.driver.free(p.at).unwrap();
    let complaints = p.r.complaints();
    assert!(
        complaints.iter().any(|line| line.contains("left of cuBLASLt's descriptions: 5")),
        "{complaints:?}"
    );
    assert!(complaints.iter().any(|line| line.contains("handle of cuBLASLt, 1")), "{complaints:?}");
}

#[test]
fn events_have_the_time_of_work_that_was_waited_for() {
    let mut r = ready("");
    let [begin, end] = [0; 2].map(|flags| r.driver.event(flags).unwrap());
    fails(r.driver.elapsed(begin, end), CUDA_ERROR_INVALID_HANDLE);
    r.zero();
    r.driver.record_event(begin, r.stream).unwrap();
    r.launch().unwrap();
    r.launch().unwrap();
    r.driver.record_event(end, r.stream).unwrap();
    fails(r.driver.elapsed(begin, end), CUDA_ERROR_NOT_READY);
    r.wait().unwrap();
    assert_eq!(r.driver.elapsed(begin, end).unwrap(), 2.0);
    for event in [begin, end] {
        r.driver.destroy_event(event).unwrap();
    }
    fails(r.driver.record_event(end, r.stream), CUDA_ERROR_INVALID_HANDLE);
    let complaints = r.complaints();
    assert!(
        complaints[0].contains("that nobody waited for") && complaints[1].contains("event that is gone"),
        "{complaints:?}"
    );
    assert_eq!(complaints.len(), 2);
}
