# How llama.cpp is compiled for DuoChat: named by CMAKE_PROJECT_INCLUDE in README's first command, read after each project().
#
# Without AMX: compiled by GCC 12 or older, its tile configuration is dropped and the first decode dies of an illegal
# instruction; and the kernel may refuse tiles to the threads that compute (llama.cpp pull request 26954). All other
# instructions of this processor are used. A compiler that does not know the options (arm64) is left alone.
# Without the vision library and the parts for programs, which DuoChat does not use.
include(CheckCCompilerFlag)
set(LLAVA_BUILD OFF CACHE BOOL "")
set(LLAMA_BUILD_COMMON OFF)
foreach(part tile int8 bf16)
  check_c_compiler_flag(-mno-amx-${part} NO_AMX_${part})
  if(NO_AMX_${part})
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-mno-amx-${part}>)
  endif()
endforeach()
