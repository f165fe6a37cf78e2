# find_package(tilekernels) gives the target tilekernels::tilekernels: the headers and libtilekernels.so.0, wherever this
# folder lies (a wheel's folder is printed by `tilekernels --cmake-dir`).
get_filename_component(tilekernels_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET tilekernels::tilekernels)
  add_library(tilekernels::tilekernels SHARED IMPORTED)
  set_target_properties(tilekernels::tilekernels PROPERTIES
    IMPORTED_LOCATION "${tilekernels_prefix}/lib/libtilekernels.so.0"
    IMPORTED_SONAME libtilekernels.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${tilekernels_prefix}/include")
endif()
unset(tilekernels_prefix)
