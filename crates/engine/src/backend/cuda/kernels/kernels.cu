// Every kernel, as one unit.
#include "kernels.h"

#include "decode.cu"
#include "linear.cu"
#include "rows.cu"
