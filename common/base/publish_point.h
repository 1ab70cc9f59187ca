// Where a test may kill or stop a process: just after each store that others can see (docs/shared-memory.md). Without the environment variable
// HEARTH_PUBLISH_POINT this is one load of a constant pointer.
// Room: common/base. HEARTH_PUBLISH_POINT="<name>:<n>:<kill|stop>": at the n-th pass of that point (from 1) the process sends itself the signal.
#pragma once

namespace hearth {

void PublishPoint(const char* name);

}  // namespace hearth
