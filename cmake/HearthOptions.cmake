# Compiler settings that hold for every target.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

option(HEARTH_WERROR "Warnings are errors" ON)
set(HEARTH_SANITIZE "" CACHE STRING "Sanitizers to build with, for instance 'address,undefined' or 'thread'")

# Kernels pin their own instruction sets per file; everything else must run on any x86-64.
add_compile_options(-Wall -Wextra -Wpedantic -Wno-unused-parameter -Wno-missing-field-initializers)
if(HEARTH_WERROR)
  add_compile_options(-Werror)
endif()
# Sums have one order on every path (DESIGN section 7): the compiler must not contract or reassociate them.
add_compile_options(-ffp-contract=off)
if(HEARTH_SANITIZE)
  add_compile_options(-fsanitize=${HEARTH_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${HEARTH_SANITIZE})
  # GCC's flow warnings misfire on instrumented code.
  add_compile_options(-Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overflow -Wno-tsan)
endif()

find_program(CCACHE ccache)
if(CCACHE)
  # Precompiled headers need these two; see the ccache manual, "Precompiled headers".
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
  add_compile_options(-fpch-preprocess)
endif()
