# One line per library, executable, test and benchmark, so that a folder's CMakeLists.txt reads as its table of contents.
get_filename_component(HEARTH_ROOT "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)

# hearth_library(NAME SRCS a.cc ... [DEPS targets ...] [PCH target])   PCH: reuse that target's precompiled header
function(hearth_library name)
  cmake_parse_arguments(A "" "PCH" "SRCS;DEPS" ${ARGN})
  if(A_SRCS)
    add_library(${name} STATIC ${A_SRCS})
    target_include_directories(${name} PUBLIC ${HEARTH_ROOT})
    target_link_libraries(${name} PUBLIC ${A_DEPS} Threads::Threads)
    if(A_PCH)
      target_precompile_headers(${name} REUSE_FROM ${A_PCH})
    endif()
  else()
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE ${HEARTH_ROOT})
    target_link_libraries(${name} INTERFACE ${A_DEPS} Threads::Threads)
  endif()
endfunction()

# hearth_executable(NAME SRCS main.cc [DEPS targets ...])   lands in <build>/bin; what includes gRPC goes into a library with its precompiled header
function(hearth_executable name)
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${A_SRCS})
  target_include_directories(${name} PRIVATE ${HEARTH_ROOT})
  target_link_libraries(${name} PRIVATE ${A_DEPS} Threads::Threads)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
endfunction()

# hearth_test(NAME SRCS x_test.cc [DEPS targets ...] [TIMEOUT seconds] [PCH target])   one ctest entry per binary; the binary says which case failed.
# Tests find the tree through HEARTH_SOURCE_DIR, the outside oracles through HEARTH_SHARED_DIR, binaries through HEARTH_BIN_DIR.
function(hearth_test name)
  cmake_parse_arguments(A "" "TIMEOUT;PCH" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  add_executable(${name} ${A_SRCS})
  target_include_directories(${name} PRIVATE ${HEARTH_ROOT})
  target_link_libraries(${name} PRIVATE ${A_DEPS} GTest::gmock_main Threads::Threads)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(A_PCH)
    # A precompiled header is bound to the flags it was made with, and libraries are PIC where executables would be PIE.
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${name} PRIVATE -fPIC)
    target_precompile_headers(${name} REUSE_FROM ${A_PCH})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  hearth_test_properties(${name} ${A_TIMEOUT} "${A_LABELS}")
endfunction()

# hearth_test_tool(NAME SRCS main.cc [DEPS targets ...])   a program that script tests run; lands in <build>/tests
function(hearth_test_tool name)
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${A_SRCS})
  target_include_directories(${name} PRIVATE ${HEARTH_ROOT})
  target_link_libraries(${name} PRIVATE ${A_DEPS} Threads::Threads)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
endfunction()

# hearth_script_test(NAME COMMAND ... [TIMEOUT seconds])   a test that drives real processes
function(hearth_script_test name)
  cmake_parse_arguments(A "" "TIMEOUT" "COMMAND;LABELS" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  add_test(NAME ${name} COMMAND ${A_COMMAND})
  hearth_test_properties(${name} ${A_TIMEOUT} "${A_LABELS}")
endfunction()

function(hearth_test_properties name timeout labels)
  set(shared "$ENV{HEARTH_SHARED_DIR}")
  if(NOT shared)
    set(shared "${HEARTH_ROOT}/../shared")
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${timeout} LABELS "${labels}" SKIP_RETURN_CODE 77
    ENVIRONMENT "HEARTH_SOURCE_DIR=${HEARTH_ROOT};HEARTH_SHARED_DIR=${shared};HEARTH_BIN_DIR=${CMAKE_BINARY_DIR}/bin")
endfunction()

# hearth_bench(NAME SRCS x_bench.cc [DEPS targets ...])   lands in <build>/bench; never run by ctest
function(hearth_bench name)
  cmake_parse_arguments(A "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${A_SRCS})
  target_include_directories(${name} PRIVATE ${HEARTH_ROOT})
  target_link_libraries(${name} PRIVATE ${A_DEPS} benchmark::benchmark Threads::Threads)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench)
endfunction()
