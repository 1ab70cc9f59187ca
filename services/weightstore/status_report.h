// What `hearth status` shows of the store. Room: services/weightstore. Threads: any. Reads only.
#pragma once

#include "hearth/v1/store.pb.h"
#include "services/weightstore/store.h"

namespace hearth {

// All but the process's own numbers (pid, uptime).
void FillStatus(Store& store, v1::StoreStatus* status);

}  // namespace hearth
