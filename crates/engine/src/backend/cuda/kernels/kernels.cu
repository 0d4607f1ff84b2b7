// Every kernel, as one unit.
#include "kernels.h"

#include "decode.cu"
#include "linear.cu"
#include "prefill.cu"
#include "rows.cu"
#include "sample.cu"
