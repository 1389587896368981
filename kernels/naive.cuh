// For naive texts that read weights in few bits (`blocks.cuh`): they are CUDA and HIP as they are
// written. All other naive texts are kernel statements, and are printed.
#pragma once

#include "words.cuh"
#include "library.cuh"
