//! Metal itself, by its bindings.

use crate::Refused;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue, MTLCompileOptions,
    MTLComputeCommandEncoder, MTLComputePipelineState, MTLCopyAllDevices, MTLDevice, MTLLibrary, MTLResource,
    MTLResourceOptions, MTLResourceUsage, MTLSize,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

type Object<P> = Retained<ProtocolObject<P>>;

/// A GPU of Apple's.
pub struct Card {
    device: Object<dyn MTLDevice>,
    title: String,
}

// SAFETY: devices, queues, buffers and pipelines of Metal may be used from any thread; command
// buffers and encoders are used by one at a time, as `Memory` is.
unsafe impl Send for Card {}
// SAFETY: likewise.
unsafe impl Sync for Card {}

fn words(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

impl Card {
    /// GPU number `number`, or why there is none.
    pub fn new(number: usize) -> Result<Self, String> {
        let devices = MTLCopyAllDevices();
        let device = devices.iter().nth(number).ok_or_else(|| match devices.len() {
            0 => "the system has no GPU that Metal knows; use `--device cpu`".to_string(),
            1 => "no such GPU; there is one (metal:0)".into(),
            count => format!("no such GPU; there are {count} (metal:0 is the first)"),
        })?;
        let title = device.name().to_string();
        Ok(Card { device, title })
    }

    /// Its name.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// Bytes that a process can still have without being slowed down.
    pub fn free(&self) -> u64 {
        let taken = self.device.currentAllocatedSize() as u64;
        self.device.recommendedMaxWorkingSetSize().saturating_sub(taken)
    }
}

/// Compiled kernels by name.
pub struct Code(HashMap<String, Object<dyn MTLComputePipelineState>>);

// SAFETY: pipelines may be used from any thread.
unsafe impl Send for Code {}

/// Launches that were given and not yet sent.
struct Open {
    buffer: Object<dyn MTLCommandBuffer>,
    encoder: Object<dyn MTLComputeCommandEncoder>,
    launches: usize,
}

/// Launches of a command buffer at most: the GPU begins with the first of them after the last.
const TOGETHER: usize = 64;

/// A session's memory and launches.
pub struct Memory {
    card: Arc<Card>,
    queue: Option<Object<dyn MTLCommandQueue>>,
    buffers: Vec<Object<dyn MTLBuffer>>,
    /// Launches under way, which reading waits for.
    under_way: RefCell<UnderWay>,
}

#[derive(Default)]
struct UnderWay {
    open: Option<Open>,
    sent: Vec<Object<dyn MTLCommandBuffer>>,
}

// SAFETY: see `Card`; a session is used by one thread at a time.
unsafe impl Send for Memory {}

impl UnderWay {
    /// Sends what is open.
    fn send(&mut self) {
        if let Some(open) = self.open.take() {
            open.encoder.endEncoding();
            open.buffer.commit();
            self.sent.push(open.buffer);
        }
    }

    /// Waits for everything.
    fn finish(&mut self) -> Result<(), String> {
        self.send();
        let mut failed = None;
        for buffer in self.sent.drain(..) {
            buffer.waitUntilCompleted();
            failed = failed.or(buffer.error());
        }
        failed.map_or(Ok(()), |error| Err(words(&error)))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Buffers may be given back when nothing uses them. A failure cannot be reported.
        let _ = self.under_way.get_mut().finish();
    }
}

impl Memory {
    /// None so far.
    pub fn new(card: Arc<Card>) -> Self {
        let queue = card.device.newCommandQueue();
        Memory { card, queue, buffers: vec![], under_way: RefCell::default() }
    }

    /// Zeroed memory: its address on the GPU.
    pub fn allocate(&mut self, bytes: u64) -> Result<u64, Refused> {
        let length = usize::try_from(bytes.max(16)).map_err(|_| Refused::Full)?;
        if length > self.card.device.maxBufferLength() {
            return Err(Refused::Full);
        }
        let options = MTLResourceOptions::StorageModeShared;
        let buffer = self.card.device.newBufferWithLength_options(length, options).ok_or(Refused::Full)?;
        // SAFETY: the buffer's own memory, which nobody else knows yet.
        unsafe { buffer.contents().cast::<u8>().write_bytes(0, length) };
        let address = buffer.gpuAddress();
        self.buffers.push(buffer);
        match address {
            0 => Err(Refused::Failed(
                "buffers have no addresses; Metal 3 is needed (macOS 13, Apple silicon)".into(),
            )),
            address => Ok(address),
        }
    }

    /// The kernels of a text.
    pub fn load(&mut self, text: &str, entries: &[&str]) -> Result<Code, String> {
        autoreleasepool(|_| {
            let options = MTLCompileOptions::new();
            // Sums and products are rounded as they are written, and a NaN stays one.
            #[expect(deprecated, reason = "its successor needs macOS 15")]
            options.setFastMathEnabled(false);
            let device = &self.card.device;
            let library =
                device.newLibraryWithSource_options_error(&NSString::from_str(text), Some(&options));
            let library = library.map_err(|error| words(&error))?;
            let mut code = HashMap::new();
            for entry in entries {
                let function = library.newFunctionWithName(&NSString::from_str(entry));
                let function = function.ok_or_else(|| format!("there is no kernel {entry}"))?;
                let pipeline = device.newComputePipelineStateWithFunction_error(&function);
                code.insert(entry.to_string(), pipeline.map_err(|error| words(&error))?);
            }
            Ok(Code(code))
        })
    }

    /// Where `bytes` bytes at an address are in the memory of the process.
    fn place(&self, address: u64, bytes: usize) -> Result<NonNull<u8>, String> {
        for buffer in &self.buffers {
            let Some(at) = address.checked_sub(buffer.gpuAddress()).and_then(|at| usize::try_from(at).ok())
            else {
                continue;
            };
            if at.checked_add(bytes).is_some_and(|end| end <= buffer.length()) {
                // SAFETY: inside the buffer.
                return Ok(unsafe { buffer.contents().cast::<u8>().add(at) });
            }
        }
        Err(format!("{bytes} bytes at {address:#x} are in no buffer"))
    }

    /// Copies to the GPU, after all launches.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        self.finish()?;
        let place = self.place(address, bytes.len())?;
        // SAFETY: `bytes.len()` bytes of a buffer, which no launch uses now.
        unsafe { place.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies from the GPU, after all launches.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        self.under_way.borrow_mut().finish()?;
        let place = self.place(address, bytes.len())?;
        // SAFETY: likewise.
        unsafe { place.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// A launch, after those before it.
    pub fn launch(
        &mut self,
        code: &Code,
        entry: &str,
        grid: u32,
        block: u32,
        arguments: &[u8],
    ) -> Result<(), String> {
        autoreleasepool(|_| {
            let pipeline = code.0.get(entry).ok_or_else(|| format!("there is no kernel {entry}"))?;
            if pipeline.maxTotalThreadsPerThreadgroup() < block as usize {
                return Err(format!("{entry}: blocks of {block} threads are too large for this GPU"));
            }
            let under_way = self.under_way.get_mut();
            if under_way.open.is_none() {
                let none = || "the GPU takes no commands".to_string();
                let buffer = self.queue.as_ref().and_then(|queue| queue.commandBuffer()).ok_or_else(none)?;
                let encoder = buffer.computeCommandEncoder().ok_or_else(none)?;
                for buffer in &self.buffers {
                    let resource: &ProtocolObject<dyn MTLResource> = ProtocolObject::from_ref(&**buffer);
                    encoder.useResource_usage(resource, MTLResourceUsage::Read | MTLResourceUsage::Write);
                }
                under_way.open = Some(Open { buffer, encoder, launches: 0 });
            }
            let Some(open) = &mut under_way.open else { return Ok(()) };
            open.encoder.setComputePipelineState(pipeline);
            let given = NonNull::from(arguments).cast::<c_void>();
            // SAFETY: `arguments.len()` bytes, which the call copies: the structure that the kernel
            // declares.
            unsafe { open.encoder.setBytes_length_atIndex(given, arguments.len(), 0) };
            let size = |width: u32| MTLSize { width: width as usize, height: 1, depth: 1 };
            open.encoder.dispatchThreadgroups_threadsPerThreadgroup(size(grid), size(block));
            open.launches += 1;
            if open.launches == TOGETHER {
                under_way.send();
            }
            Ok(())
        })
    }

    /// Waits for everything.
    pub fn finish(&mut self) -> Result<(), String> {
        self.under_way.get_mut().finish()
    }
}
