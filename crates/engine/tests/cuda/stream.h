// The stand-ins' stream. Work waits in the stream until a caller waits for it, so that
// code that reads or writes too early meets wrong bytes.
#pragma once
#include <functional>

struct Stream {
    // Queues work, which returns 0 or a driver's error.
    void (*put)(std::function<int()> work);
};
