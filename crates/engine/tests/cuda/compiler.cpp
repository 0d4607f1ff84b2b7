// A compiler that compiles nothing. Its output records the requested options.
#include <cstring>
#include <string>

#ifndef FAILS
#define FAILS 0
#endif

struct Program {
    std::string code, log;
};

extern "C" int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}
extern "C" int nvrtcCreateProgram(Program** program, const char* source, const char*, int count,
                                  const char* const* headers, const char* const* names) {
    for (int i = 0; i < count; i++) {
        if (!headers[i] || !names[i]) {
            return 3;
        }
    }
    *program = new Program{std::string("stand-in code of ") + std::to_string(strlen(source)), {}};
    return 0;
}
extern "C" int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    for (int i = 0; i < count; i++) {
        program->code += std::string(" ") + options[i];
    }
    program->log = FAILS ? "line 1: this compiler is out of sorts" : "";
    return FAILS ? 6 : 0;
}
extern "C" int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
    *bytes = program->code.size() + 1;
    return 0;
}
extern "C" int nvrtcGetCUBIN(Program* program, char* to) {
    memcpy(to, program->code.c_str(), program->code.size() + 1);
    return 0;
}
extern "C" int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
    *bytes = program->log.size() + 1;
    return 0;
}
extern "C" int nvrtcGetProgramLog(Program* program, char* to) {
    memcpy(to, program->log.c_str(), program->log.size() + 1);
    return 0;
}
extern "C" int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}
