// The stand-ins' stream: work waits in it until somebody waits for the work,
// so that who reads or writes too early meets the wrong bytes.
#pragma once
#include <functional>

struct Stream {
    // Puts work, which returns 0 or a driver's error, behind what waits.
    void (*put)(std::function<int()> work);
};
