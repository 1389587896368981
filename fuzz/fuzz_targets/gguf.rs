#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| dreamc_fuzz::run("gguf", data));
